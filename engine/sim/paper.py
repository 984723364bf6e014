"""The two tables of the documentation, from the engine's own scheduler: what a knob does, in numbers one can check.

A: 48 chats, then a 32,000-token prompt with six short ones right behind it. B: 32 requests in a pool that is too
small for them. Measures: TTFT = first token minus arrival; ITL = gaps of the 48 chats, pooled over the run;
percentile p = element `min(n - 1, int(p * n))` of the sorted gaps; worst stall = the largest gap of any request;
makespan = the clock at the end of the last step.
"""

from collections.abc import Mapping

import msgspec

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import Knobs, KnobValue, change_knobs, knob_table
from schedtop.engine.sim.simulate import Arrival, SimulationResult, simulate
from schedtop.engine.sim.step_model import PAPER_MODEL

NUM_CHATS, NUM_SHORTS = 48, 6
LONG_PROMPT = 32_000

KnobChanges = Mapping[str, KnobValue]
DEFAULT_ROWS: dict[str, tuple[KnobChanges, ...]] = {
    "A": (
        {},
        {"max_num_batched_tokens": 8192},
        {"max_num_batched_tokens": 32768},
        {"max_num_batched_tokens": 8192, "long_prefill_token_threshold": 2048},
    ),
    "B": ({}, {"max_num_seqs": 24}, {"max_num_seqs": 16}),
}


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


def paper_config(num_blocks: int, max_num_seqs: int) -> EngineConfig:
    """The plain rules: no null block, no model length, all of the pool usable."""
    return EngineConfig(
        num_kv_blocks=num_blocks,
        null_block=False,
        max_model_len=None,
        max_num_batched_tokens=1 << 20,
        max_num_seqs=max_num_seqs,
        watermark_counts_null_block=False,
    )


def paper_knobs(max_num_batched_tokens: int, max_num_seqs: int) -> Knobs:
    """The plain rules' live settings: no prefix cache, no reservation."""
    return Knobs(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        reserve_full_prompt=False,
        prefix_caching=False,
    )


def run_a(changes: KnobChanges) -> RowA:
    """One row of table A, with `changes` over budget 2048 and threshold 0. Raises `KnobRefused`."""
    config = paper_config(num_blocks=100_000, max_num_seqs=256)
    knobs = change_knobs(paper_knobs(2048, 256), changes, knob_table(config))
    result = simulate(config, knobs, PAPER_MODEL, arrivals_a())
    chats = [f"chat{i}" for i in range(NUM_CHATS)]
    gaps = sorted(gap for chat in chats for gap in result.outcomes[chat].gaps_s)
    shorts = [result.outcomes[f"short{i}"].ttft_s for i in range(NUM_SHORTS)]
    return RowA(
        max_num_batched_tokens=knobs.max_num_batched_tokens,
        long_prefill_token_threshold=knobs.long_prefill_token_threshold,
        long_ttft_ms=result.outcomes["long"].ttft_s * 1e3,
        short_ttft_ms=sum(shorts) / len(shorts) * 1e3,
        itl_p50_ms=percentile(gaps, 0.50) * 1e3,
        itl_p99_ms=percentile(gaps, 0.99) * 1e3,
        itl_max_ms=gaps[-1] * 1e3,
    )


def run_b(changes: KnobChanges) -> RowB:
    """One row of table B, with `changes` over budget 8192 and 32 sequences. Raises `KnobRefused`."""
    config = paper_config(num_blocks=1200, max_num_seqs=256)
    knobs = change_knobs(paper_knobs(8192, 32), changes, knob_table(config))
    result = simulate(config, knobs, PAPER_MODEL, arrivals_b())
    return RowB(
        max_num_seqs=knobs.max_num_seqs,
        preemptions=result.num_preemptions,
        tokens_recomputed=result.num_lost_tokens,
        worst_stall_ms=worst_stall_s(result) * 1e3,
        makespan_ms=result.makespan_s * 1e3,
    )


def arrivals_a() -> list[Arrival]:
    """48 chats (1,000 in, 250 out) at 0 s; at 3 s a long prompt (20 out); at 3.001 s six of 600 tokens (20 out)."""
    chats = [Arrival(f"chat{i}", 0.0, _prompt(1000), 250) for i in range(NUM_CHATS)]
    shorts = [Arrival(f"short{i}", 3.001, _prompt(600), 20) for i in range(NUM_SHORTS)]
    return [*chats, Arrival("long", 3.0, _prompt(LONG_PROMPT), 20), *shorts]


def arrivals_b() -> list[Arrival]:
    """32 requests (400 in, 600 out) at once."""
    return [Arrival(f"r{i}", 0.0, _prompt(400), 600) for i in range(32)]


def percentile(ordered: list[float], p: float) -> float:
    """Element `min(n - 1, int(p * n))` of a sorted, non-empty list."""
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))]


def worst_stall_s(result: SimulationResult) -> float:
    """The largest gap between two tokens of any request."""
    return max(gap for outcome in result.outcomes.values() for gap in outcome.gaps_s)


def _prompt(num_tokens: int) -> list[int]:
    return [0] * num_tokens  # the prefix cache is off: nobody looks at the tokens
