"""The plugin on vLLM's own scheduler without a model: attributes missing, system calls, long queues."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_server import environment

SCRIPT = Path(__file__).parents[1] / "support/vllm_alone.py"
NUM_TOKENS = {"r0": 60, "r1": 60, "r2": 60, "r3": 60, "r4": 60, "r5": 60}
ABORTED, LENGTHENED = "r1", "r4"


def start(folder: Path, runtime: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(folder / "venv/bin/python"), str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment(folder, runtime), capture_output=True, text=True, timeout=250)


def run(folder: Path, runtime: Path, *arguments: str) -> Any:
    ended = start(folder, runtime, *arguments)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reads(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(vllm_folder, tmp_path_factory.mktemp("a"), "reads")


def test_everything_works_on_the_scheduler_as_it_is(reads: dict[str, Any]) -> None:
    assert reads["is_on"]
    assert reads["failed"] == []
    assert reads["preemptions"] > 0
    assert reads["ends"][ABORTED] == "abort"
    assert reads["num_tokens"][LENGTHENED] == 63
    assert all(reads["num_tokens"][name] == 60 for name in set(NUM_TOKENS) - {ABORTED, LENGTHENED})


def test_without_any_one_attribute_that_is_read_vllm_serves_on_and_says_what_is_missing(
    reads: dict[str, Any], vllm_folder: Path, tmp_path: Path
) -> None:
    answers = run(vllm_folder, tmp_path, "hide", *reads["seen"])
    assert len(answers) > 30
    for name, answer in answers.items():
        assert len(answer["num_tokens"]) == len(NUM_TOKENS), name
        for request, count in answer["num_tokens"].items():
            assert count in (60, 63) or (answer["ends"][request] == "abort" and request == ABORTED), name
        assert answer["is_on"] == answer["is_attached"], (name, answer["said"])
        assert answer["failed"] == [], name
        assert any(f"has no {name}" in line or f", {name}" in line for line in answer["said"]), (name, answer["said"])


def test_the_engine_thread_makes_no_system_call(vllm_folder: Path, tmp_path: Path) -> None:
    answer = run(vllm_folder, tmp_path, "quiet")
    assert answer["on"]
    assert answer["updates"] >= 20
    assert answer["steps"] > 20


def test_a_system_call_in_the_engine_thread_would_be_seen(vllm_folder: Path, tmp_path: Path) -> None:
    ended = start(vllm_folder, tmp_path, "quiet", "offend")
    assert ended.returncode != 0
    assert "in engine" in ended.stderr


def test_a_change_of_policy_loses_nobody_of_a_long_queue(vllm_folder: Path, tmp_path: Path) -> None:
    answer = run(vllm_folder, tmp_path, "policy")
    assert answer["counts"] == [2500, 2500]
    assert answer["firsts"] == [["r6", "r13", "r20"], ["r0", "r1", "r2"]]


def test_a_fault_of_the_plugin_switches_it_off_and_leaves_nothing_held_or_paused(
    vllm_folder: Path, tmp_path: Path
) -> None:
    answer = run(vllm_folder, tmp_path, "fault")
    assert answer["num_tokens"] == NUM_TOKENS
    assert answer["on"] is False
    assert "vLLM itself serves on" in answer["goodbye"]
    assert any("vLLM serves on" in line for line in answer["said"])
