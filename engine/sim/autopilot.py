"""What an autopilot does next: candidates for the knobs, each tried on the same futures, and the best of them.

Sans I/O. The futures are a forecast's (`draw.py`): the engine's own scheduler from its live state. What is compared is
the number of requests that will likely keep their promises, among those that are there now and those that come within
the horizon: the draws go on without new ones until nobody can still be in time, so that putting work off is no gain.
"""

import statistics
import time
from collections.abc import Mapping

import msgspec

from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import Knobs, KnobSpec, KnobValue, change_knobs, knob_table
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.sim.draw import Draw
from schedtop.engine.sim.goodput import Slo
from schedtop.engine.sim.state import EngineState
from schedtop.engine.sim.step_model import FittedModel, StepModel

BUDGET, THRESHOLD, CAP = "max_num_batched_tokens", "long_prefill_token_threshold", "max_num_seqs"
KNOBS = (BUDGET, THRESHOLD, CAP)
"""What is turned, in the order in which it is tried."""
LEAST_BUDGET = 64
WINDOW_S = 20.0
"""How far back arrivals say what comes next: less than in a forecast that an operator asks for, since loads change."""
MARGIN = 0.02
"""A candidate must be better by such a share of what the present knobs are worth, else all stays as it is."""

NUM_DRAWS = 3
"""Futures on which the chosen one is compared with the present knobs."""

Range = tuple[int, int]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Between what values each knob may be turned, inclusive. A threshold of 0 is no threshold: always allowed."""

    ranges: dict[str, Range]

    def allows(self, name: str, value: int) -> bool:
        """Whether a knob may have a value."""
        low, high = self.ranges[name]
        return low <= value <= high or (name == THRESHOLD and value == 0)

    def clamp(self, name: str, value: int) -> int:
        """The nearest value allowed."""
        low, high = self.ranges[name]
        return max(low, min(high, value))


def bounds_of(specs: Mapping[str, KnobSpec], given: Mapping[str, Range]) -> Bounds:
    """The operator's bounds, and for the rest as far as the engine was built for.

    Raises `SchedtopError` for a bound that no value of the knob can reach.
    """
    ranges = {}
    for name in KNOBS:
        if (spec := specs.get(name)) is None:
            continue
        assert spec.high is not None, "each of them has a ceiling"
        ceiling = int(spec.high)
        low, high = given.get(name, (min(1 if name == CAP else LEAST_BUDGET, ceiling), ceiling))
        if high > ceiling:
            raise SchedtopError(f"{name}={low}..{high} goes beyond its ceiling here, {ceiling}: give one up to that")
        ranges[name] = (low, high)
    return Bounds(ranges=ranges)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to set now, and what it rests on."""

    changes: dict[str, KnobValue]
    """Empty: leave all as it is."""
    num_requests: int
    """Requests in question: those that are there, and those foreseen to come within the horizon."""
    worth_now: float
    """Of those, how many would be in time with the knobs as they are, a late one counting for a part ..."""
    worth_then: float
    """... and with the changes."""
    num_candidates: int
    cpu_s: float

    @property
    def reason(self) -> str:
        """For the audit log."""
        return (
            f"of {self.num_requests} requests foreseen in time: {self.worth_now:.0f} as it is, "
            f"{self.worth_then:.0f} with it; {self.num_candidates} tried"
        )


def decide(
    state: EngineState,
    fitted: FittedModel,
    slo: Slo,
    bounds: Bounds,
    *,
    horizon_s: float = 8.0,
    cpu_limit_s: float = 2.0,
    seed: int = 0,
) -> Decision:
    """Choose the knobs for the next seconds. Raises `KnobRefused` if bounds go beyond what the engine was built for.

    One draw of the future screens the candidates; the best of them and the present knobs are then compared on others.
    """
    return _Choice(state, fitted.model, slo, bounds, horizon_s, cpu_limit_s, seed).decide()


class _Choice:
    """One decision."""

    def __init__(
        self, state: EngineState, model: StepModel, slo: Slo, bounds: Bounds, horizon_s: float, cpu_limit_s: float,
        seed: int,
    ) -> None:  # fmt: skip
        self._state = state
        self._model = model
        self._slo = slo
        self._bounds = bounds
        self._horizon_s = horizon_s
        self._seed = seed
        self._started = time.process_time()
        self._deadline = self._started + cpu_limit_s
        self._table = knob_table(state.config)
        self._worths: dict[tuple[tuple[int, ...], int], float] = {}
        self._num_requests = 0

    def decide(self) -> Decision:
        now = {name: int(getattr(self._state.knobs, name)) for name in KNOBS if name in self._bounds.ranges}
        worth_now = self._worth(now)
        margin = MARGIN * max(1.0, worth_now)
        best, worth = now, worth_now
        if worth_now < self._num_requests - margin:
            best, worth = self._search(now, worth_now, margin)
        num_candidates = len(self._worths)
        if best != now and worth >= worth_now + margin:
            others = range(1, NUM_DRAWS)
            worth_now = statistics.fmean([worth_now, *(self._worth(now, number) for number in others)])
            worth = statistics.fmean([worth, *(self._worth(best, number) for number in others)])
        if worth < worth_now + margin:
            best, worth = now, worth_now
        return Decision(
            changes={name: value for name, value in best.items() if value != now[name]},
            num_requests=self._num_requests,
            worth_now=worth_now,
            worth_then=worth,
            num_candidates=num_candidates,
            cpu_s=time.process_time() - self._started,
        )

    def _search(self, now: dict[str, int], worth_now: float, margin: float) -> tuple[dict[str, int], float]:
        """One knob after the other, each from the best so far, until the time is up."""
        best, worth = now, worth_now
        for name in now:
            for value in self._candidates(name, best):
                if time.process_time() >= self._deadline:
                    return best, worth
                candidate = {**best, name: value}
                tried = self._worth(candidate)
                if tried > worth + margin / 4:
                    best, worth = candidate, tried
        return best, worth

    def _candidates(self, name: str, best: Mapping[str, int]) -> list[int]:
        """Other values worth a try for a knob, the likeliest first."""
        value = best[name]
        match name:
            case "max_num_batched_tokens":
                wanted = [*self._budgets_for_gap(), 2 * value, self._most(name), value // 2, 4 * value, value // 4]
            case "long_prefill_token_threshold":
                budget = best[BUDGET]
                wanted = [0, budget // 2, budget // 4, budget // 8]
            case _:
                wanted = [self._most(name), value * 3 // 4, value * 4 // 3, value // 2, value * 2, self._num_running()]
        allowed = (0 if name == THRESHOLD and not wish else self._bounds.clamp(name, wish) for wish in wanted)
        return [wish for wish in dict.fromkeys(allowed) if wish != value]

    def _budgets_for_gap(self) -> list[int]:
        """Budgets whose steps take as long as a gap may, beside those that decode now."""
        if self._slo.itl_s is None or self._model.per_prefill_token_s <= 0:
            return []
        decoding = [saved for saved in self._state.requests if saved.is_running and saved.num_output_tokens]
        context = sum(saved.num_prompt_tokens + saved.num_output_tokens for saved in decoding)
        room = [
            self._model.budget_for(share * self._slo.itl_s, len(decoding), context) + len(decoding)
            for share in (0.9, 0.75)
        ]
        return [budget for budget in room if budget > len(decoding)]

    def _num_running(self) -> int:
        return max(1, sum(saved.is_running for saved in self._state.requests))

    def _most(self, name: str) -> int:
        return self._bounds.ranges[name][1]

    def _worth(self, values: Mapping[str, int], number: int = 0) -> float:
        """What the requests in question are worth in one draw of the future."""
        key = tuple(values.values()), number
        if key not in self._worths:
            ledger = self._look_ahead(change_knobs(self._state.knobs, dict(values), self._table), self._seed + number)
            if not self._worths:
                self._num_requests = len(ledger.fates)
            self._worths[key] = ledger.worth(self._slo)
        return self._worths[key]

    def _look_ahead(self, knobs: Knobs, seed: int) -> "_Ledger":
        ledger = _Ledger(self._state)
        draw = Draw(self._state, knobs, self._model, self._horizon_s, seed, window_s=WINDOW_S, watch=ledger.note)
        try:
            draw.advance(self._horizon_s + (self._slo.ttft_s or 0.0))
        finally:
            draw.end()
        ledger.close(draw)
        return ledger


class _Fate(msgspec.Struct):
    """What becomes of a request in a draw. Times by the engine's clock."""

    arrived: float
    first: float | None = None
    """When its first token came; None while there is none, or if it came before the draw."""
    last: float | None = None
    gaps: list[float] = []
    is_over: bool = False


class _Ledger:
    """Follows every request of a draw."""

    def __init__(self, state: EngineState) -> None:
        self.fates: dict[str, _Fate] = {}
        for saved in state.requests:
            had_tokens = saved.num_output_tokens > 0
            self.fates[saved.request_id] = _Fate(saved.arrived, last=state.mono if had_tokens else None, gaps=[])

    def note(self, taken: EngineCoreOutputs, now: float) -> None:
        """The end of a step."""
        for output in taken.outputs:
            fate = self.fates.get(output.request_id)
            if fate is None:
                fate = self.fates[output.request_id] = _Fate(now, gaps=[])
            if output.new_token_ids:
                if fate.last is None:
                    fate.first = now
                else:
                    fate.gaps.append(now - fate.last)
                fate.last = now
            fate.is_over = output.finish_reason is not None

    def close(self, draw: Draw) -> None:
        """The end of the draw: who came when, and how long those have waited who aren't done."""
        for request_id, arrived in draw.arrived.items():
            self.fates.setdefault(request_id, _Fate(arrived, gaps=[])).arrived = arrived
        for fate in self.fates.values():
            if fate.last is not None and not fate.is_over:
                fate.gaps.append(draw.now - fate.last)

    def worth(self, slo: Slo) -> float:
        """Of all that got a token."""
        return sum(
            slo.worth(None if fate.first is None else fate.first - fate.arrived, fate.gaps)
            for fate in self.fates.values()
            if fate.last is not None
        )
