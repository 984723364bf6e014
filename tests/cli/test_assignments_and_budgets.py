"""What is written twice or asks for what can't be: assignments and the budget of a step, before any engine is asked."""

import click
import pytest
from click.testing import CliRunner

from schedtop.cli.foresight import _budget, model
from schedtop.cli.knobs import knobs
from schedtop.cli.values import as_changes
from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import KnobRefused
from schedtop.engine.knobs import Knobs, change_knobs, knob_table
from schedtop.engine.sim.step_model import PAPER_MODEL, FittedModel

FITTED = FittedModel(
    model=PAPER_MODEL, num_samples=100, r_squared=1.0, residual_s=0.0, sequences_seen=(1, 10),
    prefill_tokens_seen=(0, 100), context_tokens_seen=(0, 1000),
)  # fmt: skip


def test_a_knob_that_is_named_twice_is_refused_with_both_values() -> None:
    run = CliRunner().invoke(knobs, ["set", "max_num_seqs=8", "policy=fcfs", "max_num_seqs=9"])
    assert run.exit_code == 2
    assert "max_num_seqs is given twice: 8 and 9" in run.output
    with pytest.raises(click.UsageError):
        as_changes([("watermark", 0.1), ("watermark", 0.1)])


def test_a_proposed_budget_ends_at_the_ceiling_and_says_so() -> None:
    assert _budget(FITTED, 0.05, 4096).startswith("2080 tokens, beside 10")
    assert _budget(FITTED, 3600.0, 4096).startswith("4096 tokens, the ceiling of max_num_batched_tokens")


def test_a_budget_for_no_time_is_refused() -> None:
    run = CliRunner().invoke(model, ["--budget-for", "0"])
    assert run.exit_code == 2
    assert "give one above 0" in run.output


def test_only_what_is_allocated_at_start_is_called_so() -> None:
    table = knob_table(EngineConfig())
    with pytest.raises(KnobRefused, match="allocated at start"):
        change_knobs(Knobs(), {"max_num_seqs": 65}, table)
    with pytest.raises(KnobRefused, match=r"watermark=0.95 is above its maximum 0.9 \(give 0 to 0.9 fraction\)$"):
        change_knobs(Knobs(), {"watermark": 0.95}, table)
