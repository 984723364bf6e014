"""What a knob will do before it is turned: the engine's own scheduler run forward from its live state, twice.

Both knob sets see the same future (`future.py`), drawn from what the engine has seen lately. Several draws give a
range. Bounded in CPU time: where that ends within the first draw, both knob sets stop at the same moment and the
horizon is cut there; further draws are made while time is left. Runs in a process of its own; nothing here touches a
live engine.
"""

import time
from collections.abc import Mapping, Sequence

from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue, change_knobs, knob_table
from schedtop.engine.sim.draw import Draw
from schedtop.engine.sim.future import in_words
from schedtop.engine.sim.outlook import Forecast, Range, Start, outlook_over, range_of
from schedtop.engine.sim.state import EngineState
from schedtop.engine.sim.step_model import FittedModel, StepShape

MAX_HORIZON_S = 86_400.0
MAX_STARTS = 200
"""Waiting requests whose forecast start is told: those at the head of the queue."""
SLICE_S = 0.5
"""Modelled time for which one knob set runs before the other catches up: how far apart a cut may find them."""


def forecast(
    state: EngineState,
    fitted: FittedModel,
    changes: Mapping[str, KnobValue],
    *,
    horizon_s: float = 30.0,
    max_draws: int = 8,
    cpu_limit_s: float = 1.5,
    seed: int = 0,
) -> Forecast:
    """Compare the present knobs with `changes` over the next `horizon_s` seconds.

    Raises `KnobRefused`, or `SchedtopError` for a horizon or CPU limit that makes no sense.
    """
    if not 0 < horizon_s <= MAX_HORIZON_S:
        raise SchedtopError(f"horizon={horizon_s:g} s is outside its range: above 0, at most {MAX_HORIZON_S:g} s")
    if not cpu_limit_s > 0:
        raise SchedtopError(f"cpu={cpu_limit_s:g} s is no time to work in: give more than 0")
    knobs = change_knobs(state.knobs, changes, knob_table(state.config))
    started = time.process_time()
    runs: list[tuple[Draw, Draw]] = []
    covered_s = horizon_s
    while len(runs) < max_draws:
        now, then = (Draw(state, choice, fitted.model, horizon_s, seed + len(runs)) for choice in (state.knobs, knobs))
        reached_s = _run_side_by_side((now, then), horizon_s, started + cpu_limit_s)
        if reached_s < horizon_s and runs:
            break  # a part of a draw says nothing beside whole ones
        covered_s = min(covered_s, reached_s)
        runs.append((now, then))
        spent = time.process_time() - started
        if spent + spent / len(runs) > cpu_limit_s:
            break
    warnings = _warnings(state, fitted, runs)
    if covered_s < horizon_s:
        cut = f"looks {covered_s:g} s ahead, not {horizon_s:g} s: the CPU limit of {cpu_limit_s:g} s is up"
        warnings.insert(0, cut)
    return Forecast(
        horizon_s=covered_s,
        now=outlook_over([now.tally for now, _ in runs], covered_s),
        then=outlook_over([then.tally for _, then in runs], covered_s),
        changes={name: (getattr(state.knobs, name), getattr(knobs, name)) for name in changes},
        num_draws=len(runs),
        cpu_s=time.process_time() - started,
        warnings=warnings,
        mono=state.mono,
        starts=_starts(state, runs),
        arrivals=in_words(state),
    )


def _run_side_by_side(draws: Sequence[Draw], horizon_s: float, deadline: float) -> float:
    """Run all draws slice by slice; returns the modelled seconds they cover. The first slice is always run."""
    reached_s = 0.0
    try:
        while reached_s < horizon_s and (not reached_s or time.process_time() < deadline):
            reached_s = min(reached_s + SLICE_S, horizon_s)
            are_live = [draw.advance(reached_s) for draw in draws]
            if not any(are_live):
                return horizon_s
    finally:
        for draw in draws:
            draw.end()
    return reached_s


def _starts(state: EngineState, runs: Sequence[tuple[Draw, Draw]]) -> list[Start]:
    waiting = [saved.request_id for saved in state.requests if not saved.is_running][:MAX_STARTS]
    return [
        Start(
            request_id=request_id,
            now=_start(request_id, [now for now, _ in runs]),
            then=_start(request_id, [then for _, then in runs]),
        )
        for request_id in waiting
    ]


def _start(request_id: str, draws: Sequence[Draw]) -> Range | None:
    known = [draw.starts[request_id] for draw in draws if request_id in draw.starts]
    return range_of(known) if known and len(known) == len(draws) else None


def _warnings(state: EngineState, fitted: FittedModel, runs: Sequence[tuple[Draw, Draw]]) -> list[str]:
    """What the forecast can't know: steps larger than any seen, too short a history, requests left out."""
    most = [draw.tally.most for pair in runs for draw in pair]
    largest = StepShape(*(max(column) for column in zip(*most, strict=True)))
    warnings = [f"extrapolates: {what}" for what in fitted.beyond_seen(largest)]
    if len(state.arrivals) < 2:
        warnings.append("no arrivals seen lately: assumes that none come")
    if not state.ends:
        warnings.append("no request has ended yet: assumes that each runs to its max_tokens")
    refused = [sum(draw.num_refused for draw in column) / len(runs) for column in zip(*runs, strict=True)]
    if any(refused):
        warnings.append(f"refused at the door, per draw: {refused[0]:g} as it is, {refused[1]:g} as it would be")
    if state.num_left_out:
        warnings.append(f"{state.num_left_out} waiting requests left out")
    return warnings
