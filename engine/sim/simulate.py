"""Runs the engine's own scheduler over a list of arrivals on a virtual clock, and measures what a client would see.

Not a second scheduler: `EngineCore`'s `Scheduler`, `KVCacheManager` and queues, with a runner that returns after a
modelled time. Arrivals at or before now are taken in before each step, in stable order; an idle clock jumps to the
next one; tokens sampled in a step get the step's end time.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import RequestRefused
from schedtop.engine.knobs import Knobs, KnobValue
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.runner.simulated import END_TOKEN, SimulatedRunner
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
    num_output_tokens: int | None = None
    """Where its answer ends by itself; None: at `max_tokens`."""
    follow: "Follow | None" = None
    """Closed loop: what its client sends next."""


Follow = Callable[[float, bool], Arrival | None]
"""(when a request ended, whether it was refused) -> the client's next one, None for no more."""


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
        *,
        is_request_level: bool = False,
    ) -> None:
        """`is_request_level`: hand the next batch in only when the whole last one has ended (see `scenario.py`)."""
        self.clock = VirtualClock()
        self._lengths: dict[str, int] = {}
        runner = SimulatedRunner(model, self.clock.advance, self._lengths)
        self.core = EngineCore(config, runner, knobs, clock=self.clock)
        self.result = SimulationResult({})
        self._arrivals: list[tuple[float, int, Arrival]] = []
        """A heap by time, then by order."""
        for arrival in arrivals:
            self._expect(arrival)
        self._changes = deque(changes)
        self._departures: list[tuple[float, str]] = []
        self._watch = watch
        self._is_request_level = is_request_level

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to happen."""
        return not self.core.has_work and self._next_due() is None

    def watch(self, watch: Watch) -> None:
        """Have another one see the engine after each step from now on."""
        self._watch = watch

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

    def _expect(self, arrival: Arrival) -> None:
        self.result.outcomes[arrival.request_id] = Outcome(arrival)
        heapq.heappush(self._arrivals, (arrival.at_s, len(self.result.outcomes), arrival))

    def _next_due(self) -> float | None:
        due = [entry[0] for entry in self._arrivals[:1]] + [change.at_s for change in islice(self._changes, 1)]
        return min(due, default=None)

    def _take_in(self) -> None:
        now = self.clock.now
        while self._changes and self._changes[0].at_s <= now:
            self.core.set_knobs(self._changes.popleft().changes)
        room = self._room()
        while self._arrivals and self._arrivals[0][0] <= now and room > 0:
            self._submit(heapq.heappop(self._arrivals)[2])
            room -= 1
        while self._departures and self._departures[0][0] <= now:
            self.core.abort([heapq.heappop(self._departures)[1]], "client left")
        if (taken := self.core.take_outputs()) is not None:
            self._note(taken)

    def _room(self) -> float:
        """How many requests may be handed in now."""
        if not self._is_request_level:
            return math.inf
        scheduler = self.core.scheduler
        return 0 if scheduler.requests else scheduler.knobs.max_num_seqs

    def _submit(self, arrival: Arrival) -> None:
        sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True, stop_token_ids=(END_TOKEN,))
        if arrival.num_output_tokens is not None:
            self._lengths[arrival.request_id] = len(arrival.token_ids) + arrival.num_output_tokens
        try:
            self.core.add_request(
                arrival.request_id, list(arrival.token_ids), sampling, arrival.priority, arrived=arrival.at_s
            )
        except RequestRefused:
            self.result.outcomes[arrival.request_id].is_refused = True
            self._follow(arrival, is_refused=True)
            return
        if arrival.abort_at_s is not None:
            heapq.heappush(self._departures, (arrival.abort_at_s, arrival.request_id))

    def _step(self) -> None:
        taken = self.core.step()
        if taken is None:
            return
        self._note(taken)
        if self._watch is not None and taken.record is not None:
            self._watch(self.core, taken.record)

    def _note(self, taken: EngineCoreOutputs) -> None:
        for output in taken.outputs:
            outcome = self.result.outcomes[output.request_id]
            outcome.token_times += [self.clock.now] * len(output.new_token_ids)
            outcome.finish_reason = output.finish_reason
            if output.finish_reason is not None:
                self._follow(outcome.arrival, is_refused=False)

    def _follow(self, arrival: Arrival, is_refused: bool) -> None:
        if arrival.follow is not None and (following := arrival.follow(self.clock.now, is_refused)) is not None:
            self._expect(following)
