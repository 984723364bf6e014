"""The two tables of the documentation, from the engine's own scheduler: what a knob does, in numbers one can check.

The situations are the shipped scenarios `paper-a` and `paper-b`. Measures: TTFT = first token minus arrival; ITL = gaps
of the 48 chats, pooled over the run; percentile p = element `min(n - 1, int(p * n))` of the sorted gaps; worst stall =
the largest gap of any request; makespan = the clock at the end of the last step.
"""

from collections.abc import Mapping

import msgspec

from schedtop.engine.knobs import Knobs, KnobValue
from schedtop.engine.sim.scenario import load_scenario
from schedtop.engine.sim.simulate import Outcome, SimulationResult
from schedtop.engine.sim.summary import percentile, pooled_gaps

KnobChanges = Mapping[str, KnobValue]
ROWS_A: tuple[KnobChanges, ...] = (
    {},
    {"max_num_batched_tokens": 8192},
    {"max_num_batched_tokens": 32768},
    {"max_num_batched_tokens": 8192, "long_prefill_token_threshold": 2048},
)
ROWS_B: tuple[KnobChanges, ...] = ({}, {"max_num_seqs": 24}, {"max_num_seqs": 16})


class RowA(msgspec.Struct, frozen=True, kw_only=True):
    """A row of table A. Times in milliseconds."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    long_ttft_ms: float
    short_ttft_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float


class RowB(msgspec.Struct, frozen=True, kw_only=True):
    """A row of table B. Times in milliseconds."""

    max_num_seqs: int
    preemptions: int
    tokens_recomputed: int
    worst_stall_ms: float
    makespan_ms: float


def run_a(changes: KnobChanges) -> RowA:
    """One row of table A, with `changes` over budget 2048 and threshold 0. Raises `KnobRefused`."""
    knobs, result = _run("paper-a", changes)
    gaps = pooled_gaps(_of(result, "chat"))
    shorts = [outcome.ttft_s for outcome in _of(result, "short")]
    return RowA(
        max_num_batched_tokens=knobs.max_num_batched_tokens,
        long_prefill_token_threshold=knobs.long_prefill_token_threshold,
        long_ttft_ms=_of(result, "long")[0].ttft_s * 1e3,
        short_ttft_ms=sum(shorts) / len(shorts) * 1e3,
        itl_p50_ms=percentile(gaps, 0.50) * 1e3,
        itl_p99_ms=percentile(gaps, 0.99) * 1e3,
        itl_max_ms=gaps[-1] * 1e3,
    )


def run_b(changes: KnobChanges) -> RowB:
    """One row of table B, with `changes` over budget 8192 and 32 sequences. Raises `KnobRefused`."""
    knobs, result = _run("paper-b", changes)
    return RowB(
        max_num_seqs=knobs.max_num_seqs,
        preemptions=result.num_preemptions,
        tokens_recomputed=result.num_lost_tokens,
        worst_stall_ms=pooled_gaps(result.outcomes.values())[-1] * 1e3,
        makespan_ms=result.makespan_s * 1e3,
    )


def _run(name: str, changes: KnobChanges) -> tuple[Knobs, SimulationResult]:
    simulation = load_scenario(name).simulation(dict(changes))
    return simulation.core.scheduler.knobs, simulation.run()


def _of(result: SimulationResult, load: str) -> list[Outcome]:
    return [outcome for outcome in result.outcomes.values() if outcome.arrival.load == load]
