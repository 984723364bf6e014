"""`schedtop knobs` against a running engine: receipts for what is taken, reasons for what is not."""

import json
import subprocess

import msgspec
import pytest
from processes import Home, Served

from schedtop.control.messages import DumpSteps
from schedtop.engine.snapshot import StepRecord

pytestmark = pytest.mark.e2e


def test_a_change_comes_back_with_before_after_and_its_step(served: Served) -> None:
    receipt = served.home.json("knobs", "set", "max_num_batched_tokens=64", "--json")
    assert receipt["before"] == {"max_num_batched_tokens": 256}
    assert receipt["after"] == {"max_num_batched_tokens": 64}
    assert receipt["applied_at_step"] >= 1
    assert served.snapshot().knobs.max_num_batched_tokens == 64


def test_a_bad_value_is_refused_with_the_reason_and_changes_nothing(served: Served) -> None:
    before = served.snapshot()
    for assignment, reason in (
        ("max_num_batched_tokens=257", "above its ceiling 256 (give 1 to 256 tokens/step)"),
        ("max_num_batched_tokens=0", "below its minimum 1"),
        ("max_num_batched_tokens=-1", "below its minimum 1"),
        ("max_num_batched_tokens=x", "not a whole number"),
        ("max_num_batched_token=64", "did you mean 'max_num_batched_tokens'?"),
    ):
        run = served.home.schedtop("knobs", "set", "max_num_seqs=2", assignment, "--json")
        assert run.returncode == 1, assignment
        assert run.stderr.startswith("schedtop: error: ") and reason in run.stderr and run.stderr.count("\n") == 1
    after = served.snapshot()
    assert msgspec.to_builtins(after.knobs) == msgspec.to_builtins(before.knobs)
    assert after.generation == before.generation


def test_without_an_engine_there_is_one_line_that_says_how_to_start_one(home: Home) -> None:
    run = home.schedtop("knobs")
    assert run.returncode == 1
    assert run.stderr.startswith("schedtop: error: no engine is running") and "schedtop serve" in run.stderr


def test_from_the_acknowledged_step_on_no_chunk_is_larger_than_the_new_budget(served: Served) -> None:
    def ask_for_a_long_prompt(letter: str) -> None:
        body = {"model": "simulated", "prompt": letter * 700, "max_tokens": 2}
        command = ["curl", "-sS", f"{served.url}/v1/completions", "-H", "Content-Type: application/json"]
        subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, check=True)

    ask_for_a_long_prompt("a")
    first = served.home.json("knobs", "set", "max_num_batched_tokens=64", "--json")["applied_at_step"]
    ask_for_a_long_prompt("b")
    steps = served.ask(DumpSteps(count=1000)).data["steps"]
    records = [msgspec.convert(step, StepRecord) for step in steps]
    assert max(record.largest_prefill_chunk for record in records if record.step < first) == 256
    assert max(record.largest_prefill_chunk for record in records if record.step >= first) == 64
