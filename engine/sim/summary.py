"""What a simulation came to, per class of load and in all: the numbers an operator would compare."""

from collections.abc import Iterable

import msgspec

from schedtop.engine.sim.simulate import Outcome, SimulationResult
from schedtop.engine.snapshot import FinishReason


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One class of load. Times in milliseconds; None where there was no sample."""

    load: str
    num_requests: int
    num_finished: int
    num_refused: int
    num_aborted: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    output_tokens: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    loads: list[LoadSummary]
    makespan_s: float
    output_tokens_per_s: float
    num_steps: int
    preemptions: int
    lost_tokens: int
    refused: int


def summarise(result: SimulationResult) -> Summary:
    """Totals, and a row per class in the order of the scenario's file."""
    by_load: dict[str, list[Outcome]] = {}
    for outcome in result.outcomes.values():
        by_load.setdefault(outcome.arrival.load, []).append(outcome)
    loads = [_summarise_load(load, outcomes) for load, outcomes in by_load.items()]
    num_tokens = sum(load.output_tokens for load in loads)
    return Summary(
        loads=loads,
        makespan_s=result.makespan_s,
        output_tokens_per_s=num_tokens / result.makespan_s if result.makespan_s else 0.0,
        num_steps=result.num_steps,
        preemptions=result.num_preemptions,
        lost_tokens=result.num_lost_tokens,
        refused=result.num_refused,
    )


def _summarise_load(load: str, outcomes: list[Outcome]) -> LoadSummary:
    ttft = sorted(outcome.ttft_s for outcome in outcomes if outcome.token_times)
    itl = pooled_gaps(outcomes)
    ends = [outcome.finish_reason for outcome in outcomes]
    return LoadSummary(
        load=load,
        num_requests=len(outcomes),
        num_finished=sum(end in (FinishReason.STOP, FinishReason.LENGTH) for end in ends),
        num_refused=sum(outcome.is_refused for outcome in outcomes),
        num_aborted=ends.count(FinishReason.ABORT),
        ttft_p50_ms=_percentile_ms(ttft, 0.50),
        ttft_p95_ms=_percentile_ms(ttft, 0.95),
        itl_p50_ms=_percentile_ms(itl, 0.50),
        itl_p99_ms=_percentile_ms(itl, 0.99),
        itl_max_ms=_percentile_ms(itl, 1.0),
        output_tokens=sum(len(outcome.token_times) for outcome in outcomes),
    )


def _percentile_ms(ordered: list[float], p: float) -> float | None:
    return percentile(ordered, p) * 1e3 if ordered else None


def percentile(ordered: list[float], p: float) -> float:
    """Element `min(n - 1, int(p * n))` of a sorted, non-empty list."""
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def pooled_gaps(outcomes: Iterable[Outcome]) -> list[float]:
    """All gaps between consecutive tokens, sorted, in seconds."""
    return sorted(gap for outcome in outcomes for gap in outcome.gaps_s)
