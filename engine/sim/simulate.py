"""Runs the engine's own scheduler over a list of arrivals on a virtual clock, and measures what a client would see.

Not a second scheduler: `EngineCore`'s `Scheduler`, `KVCacheManager` and queues, with a runner that returns after a
modelled time. Arrivals at or before now are taken in before each step, in stable order; an idle clock jumps to the
next one; tokens sampled in a step get the step's end time.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import RequestRefused
from schedtop.engine.knobs import Knobs, KnobValue
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.sim.step_model import StepModel
from schedtop.engine.snapshot import FinishReason, StepRecord


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come. `token_ids` may be shared between arrivals: they are only read."""

    request_id: str
    at_s: float
    token_ids: Sequence[int]
    max_tokens: int
    priority: int = 0
    load: str = ""
    """Which part of the load it belongs to."""
    abort_at_s: float | None = None
    """When its client leaves."""


@dataclass(frozen=True, slots=True)
class KnobsAt:
    """Knobs turned at a time."""

    at_s: float
    changes: Mapping[str, KnobValue]


@dataclass(slots=True)
class Outcome:
    """What became of one request: when each of its tokens came, in seconds."""

    arrival: Arrival
    token_times: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_refused: bool = False

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
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_refused: int = 0
    num_steps: int = 0
    makespan_s: float = 0.0


Watch = Callable[[EngineCore, StepRecord], None]
"""Sees the engine after each step: a playbook or an autopilot acts from here, a test takes notes."""


class Simulation:
    """An engine on a virtual clock with everything that will happen to it."""

    def __init__(
        self,
        config: EngineConfig,
        knobs: Knobs,
        model: StepModel,
        arrivals: Iterable[Arrival],
        changes: Iterable[KnobsAt] = (),
        watch: Watch | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.core = EngineCore(config, SimulatedRunner(model, self.clock.advance), knobs, clock=self.clock)
        self._arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
        self._changes = deque(changes)
        self._departures: list[tuple[float, str]] = []
        self._watch = watch
        self.result = SimulationResult({arrival.request_id: Outcome(arrival) for arrival in self._arrivals})

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to happen."""
        return not self.core.has_work and self._next_due() is None

    def run(self, until_s: float | None = None) -> SimulationResult:
        """Serve all arrivals to their end, or up to a time; may be called again to go on."""
        while until_s is None or self.clock.now < until_s:
            self._take_in()
            if not self.core.has_work:
                due = self._next_due()
                if due is None or (until_s is not None and due >= until_s):
                    break
                self.clock.jump_to(due)
                continue
            self._step()
        totals = self.core.scheduler.stats
        result = self.result
        result.num_preemptions, result.num_lost_tokens = totals.preemptions, totals.lost_tokens
        result.num_refused, result.num_steps, result.makespan_s = totals.refused, totals.steps, self.clock.now
        return result

    def _next_due(self) -> float | None:
        due = [queue[0].at_s for queue in (self._arrivals, self._changes) if queue]
        return min(due, default=None)

    def _take_in(self) -> None:
        now = self.clock.now
        while self._changes and self._changes[0].at_s <= now:
            self.core.set_knobs(self._changes.popleft().changes)
        while self._arrivals and self._arrivals[0].at_s <= now:
            self._submit(self._arrivals.popleft())
        while self._departures and self._departures[0][0] <= now:
            self.core.abort([heapq.heappop(self._departures)[1]], "client left")

    def _submit(self, arrival: Arrival) -> None:
        sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
        try:
            self.core.add_request(
                arrival.request_id, list(arrival.token_ids), sampling, arrival.priority, arrived=arrival.at_s
            )
        except RequestRefused:
            self.result.outcomes[arrival.request_id].is_refused = True
            return
        if arrival.abort_at_s is not None:
            heapq.heappush(self._departures, (arrival.abort_at_s, arrival.request_id))

    def _step(self) -> None:
        taken = self.core.step()
        if taken is None:
            return
        for output in taken.outputs:
            outcome = self.result.outcomes[output.request_id]
            outcome.token_times += [self.clock.now] * len(output.new_token_ids)
            outcome.finish_reason = output.finish_reason
        if self._watch is not None and taken.record is not None:
            self._watch(self.core, taken.record)
