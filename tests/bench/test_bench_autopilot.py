"""`schedtop bench autopilot`: sweep and flight see the same arrivals; nobody is called ahead who paid for it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedtop.cli.bench_autopilot import BUDGETS, THRESHOLDS, Row, _settings, is_ahead, report
from schedtop.cli.main import cli
from schedtop.engine.sim.goodput import Served

LOAD = """
name = "short"
description = "a few seconds of chats with a budget that is too large"
horizon_s = 8
[engine]
num_kv_blocks = 4000
max_model_len = 8192
max_num_batched_tokens = 8192
max_num_seqs = 64
[step_time]
base_ms = 8
per_sequence_ms = 0.06
per_prefill_token_ms = 0.02
[[load]]
name = "chat"
rate_per_s = 6.0
prompt = { draw = "uniform", low = 600, high = 1500 }
output = { draw = "uniform", low = 20, high = 60 }
"""


def got(good: int, refused: int = 0, gap: float | None = 0.02) -> Served:
    return Served(
        num_requests=100, num_good=good, num_refused=refused, goodput_per_s=good / 10, itl_p99_s=gap, ttft_p95_s=1.0
    )


def row(flown: Served, static: Served, load: str = "a", seed: int = 1) -> Row:
    setting = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 64}
    return Row(
        load=load, seed=seed, autopilot=flown, num_moves=3, best_static=static, best_setting=setting, start=got(1)
    )


@pytest.mark.parametrize(
    ("flown", "static", "ahead"),
    [
        (got(90), got(80), True),
        (got(80), got(80), False),
        (got(90, refused=1), got(80), False),
        (got(90, gap=0.03), got(80), False),
        (got(90, gap=0.02), got(80, gap=0.03), True),
    ],
)
def test_ahead_is_who_serves_more_in_time_and_pays_neither_with_refusals_nor_with_gaps(flown, static, ahead) -> None:
    assert is_ahead(row(flown, static)) is ahead


def test_a_load_counts_only_if_every_draw_of_it_does() -> None:
    better, worse = (got(90), got(80)), (got(80), got(90))
    rows = [row(*better), row(*worse, seed=2), row(*better, load="b"), row(*better, load="b", seed=2)]
    lines = report(rows)
    assert lines[-1].endswith("1 of 2 loads") and sum(line.startswith("| ") for line in lines) == 2 + 3 * 4 - 0
    assert "| a | 1 | best static (512, 64) | 80 of 100 | 8.00/s | 0 | 20 ms | 1,000 ms |" in lines


def test_the_sweep_tries_every_budget_without_and_with_each_smaller_threshold() -> None:
    tried = [tuple(setting.values()) for setting in _settings(BUDGETS, THRESHOLDS)]
    assert {budget for budget, threshold in tried if threshold == 0} == set(BUDGETS)
    assert len(set(tried)) == len(tried) and all(threshold < budget for budget, threshold in tried)


def test_it_flies_and_sweeps_a_scenario_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text(LOAD)
    arguments = ["bench", "autopilot", "--only", str(path), "--seeds", "1", "--quick", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["autopilot"]["num_requests"] == found["best_static"]["num_requests"] == found["start"]["num_requests"]
    assert found["best_static"]["num_good"] >= found["start"]["num_good"] and found["seed"] == 1
