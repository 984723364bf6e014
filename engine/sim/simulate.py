"""Runs the engine's own scheduler over a list of arrivals on a virtual clock, and measures what a client would see.

Not a second scheduler: `EngineCore`'s `Scheduler`, `KVCacheManager` and queues, with a runner that returns after a
modelled time. Arrivals at or before now are taken in before each step, in stable order; an idle clock jumps to the
next arrival; tokens sampled in a step get the step's end time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.sim.step_model import StepModel
from schedtop.engine.snapshot import FinishReason


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come. `token_ids` may be shared between arrivals: they are only read."""

    request_id: str
    at_s: float
    token_ids: Sequence[int]
    max_tokens: int
    priority: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of one request: when each of its tokens came, in seconds."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; raises `IndexError` if none came."""
        return self.token_times[0] - self.arrival.at_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(slots=True)
class SimulationResult:
    """All outcomes by request id, and the totals."""

    outcomes: dict[str, Outcome]
    num_preemptions: int
    num_lost_tokens: int
    num_steps: int
    makespan_s: float


def simulate(config: EngineConfig, knobs: Knobs, model: StepModel, arrivals: Iterable[Arrival]) -> SimulationResult:
    """Serve all arrivals to their end."""
    clock = VirtualClock()
    core = EngineCore(config, SimulatedRunner(model, clock.advance), knobs, clock=clock)
    pending = sorted(arrivals, key=lambda arrival: arrival.at_s)
    outcomes = {arrival.request_id: Outcome(arrival) for arrival in pending}
    num_arrived = 0
    while num_arrived < len(pending) or core.has_work:
        if not core.has_work:
            clock.jump_to(pending[num_arrived].at_s)
        while num_arrived < len(pending) and pending[num_arrived].at_s <= clock.now:
            _submit(core, pending[num_arrived])
            num_arrived += 1
        taken = core.step()
        for output in taken.outputs if taken else ():
            outcome = outcomes[output.request_id]
            outcome.token_times += [clock.now] * len(output.new_token_ids)
            outcome.finish_reason = output.finish_reason
    totals = core.scheduler.stats
    return SimulationResult(outcomes, totals.preemptions, totals.lost_tokens, totals.steps, clock.now)


def _submit(core: EngineCore, arrival: Arrival) -> None:
    core.add_request(
        arrival.request_id,
        list(arrival.token_ids),
        SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
        priority=arrival.priority,
    )
