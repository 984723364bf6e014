"""The two tables of the documentation, to the digit, from the engine's own scheduler."""

import pytest

from schedtop.engine.sim.paper import ROWS_A, ROWS_B, run_a, run_b

TABLE_A = [
    (2048, 0, "821", "893", "10.9", "51", "51"),
    (8192, 0, "705", "776", "10.9", "174", "174"),
    (32768, 0, "670", "726", "10.9", "69", "665"),
    (8192, 2048, "902", "133", "10.9", "153", "174"),
]
TABLE_B = [(32, 13, "9,734", "4055", "9.7"), (24, 5, "4,364", "2001", "11.1"), (16, 0, "0", "9", "11.0")]


@pytest.mark.parametrize(("changes", "expected"), list(zip(ROWS_A, TABLE_A, strict=True)))
def test_table_a_is_printed_to_the_digit(changes: dict, expected: tuple) -> None:
    row = run_a(changes)
    assert expected == (
        row.max_num_batched_tokens,
        row.long_prefill_token_threshold,
        f"{row.long_ttft_ms:.0f}",
        f"{row.short_ttft_ms:.0f}",
        f"{row.itl_p50_ms:.1f}",
        f"{row.itl_p99_ms:.0f}",
        f"{row.itl_max_ms:.0f}",
    )


@pytest.mark.parametrize(("changes", "expected"), list(zip(ROWS_B, TABLE_B, strict=True)))
def test_table_b_is_printed_to_the_digit(changes: dict, expected: tuple) -> None:
    row = run_b(changes)
    assert expected == (
        row.max_num_seqs,
        row.preemptions,
        f"{row.tokens_recomputed:,}",
        f"{row.worst_stall_ms:.0f}",
        f"{row.makespan_ms / 1e3:.1f}",
    )
