"""Our scheduler decides as vLLM's own did: every recorded trace, record for record, block ids included."""

import copy
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from schedtop.cli.main import cli
from schedtop.engine.sim.conformance import first_difference, load, replay

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))


def run(*arguments: str | Path) -> Result:
    """`schedtop conformance` with standard output and error apart."""
    return CliRunner().invoke(cli, ["conformance", *map(str, arguments)])


def changed_copy(path: Path, folder: Path) -> Path:
    """The trace file with one wrong number in its third record."""
    content = json.loads(path.read_text())
    content["expect"]["records"][2]["nout"] = 99
    target = folder / path.name
    target.write_text(json.dumps(content))
    return target


@pytest.mark.parametrize("path", TRACES, ids=[path.stem for path in TRACES])
def test_scheduler_decides_as_recorded(path: Path) -> None:
    trace_file = load(path)
    assert trace_file.expect is not None
    assert first_difference(replay(trace_file.trace), trace_file.expect) is None


def test_all_given_kinds_are_there() -> None:
    kinds = {json.loads(path.read_text())["trace"]["kind"] for path in TRACES}
    assert len(TRACES) >= 67
    assert {
        "basic",
        "async_preempt",
        "prio_knobs",
        "spec_pad",
        "outgrow",
        "mix_async_prio",
        "edge_async",
        "async_spec_pad",
    } <= kinds


def test_same_trace_replays_equally_twice() -> None:
    trace = load(TRACES[0]).trace
    assert replay(trace) == replay(trace)


def test_command_prints_ok_for_each_file() -> None:
    result = run(*TRACES[:3])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"{path}: ok" for path in TRACES[:3]]


def test_command_names_the_first_record_that_differs(tmp_path: Path) -> None:
    wrong = changed_copy(TRACES[0], tmp_path)
    result = run(wrong, TRACES[1])
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{wrong}: record 2 ") and "nout: expected 99, got " in first
    assert second == f"{TRACES[1]}: ok"


def test_records_go_to_stdout_in_order_and_verdicts_to_stderr() -> None:
    files = [TRACES[5], TRACES[1]]
    result = run("--records", *files)
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines == [json.loads(path.read_text())["expect"] for path in files]
    assert result.stderr.splitlines() == [f"{path}: ok" for path in files]


def test_trace_without_expectation_can_be_replayed(tmp_path: Path) -> None:
    content = json.loads(TRACES[0].read_text())
    path = tmp_path / "new.json"
    path.write_text(json.dumps({"trace": content["trace"]}))
    result = run("--records", path)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == content["expect"]
    assert result.stderr == f"{path}: nothing to compare with\n"


def test_command_refuses_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"trace": {"config": {"block_sise": 4}, "requests": [], "max_iters": 1}}')
    result = run(path)
    assert result.exit_code == 1
    assert "is no trace file" in result.stderr and "block_sise" in result.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda expect: expect["records"].pop(), "expected 2 records, got 3"),
        (lambda expect: expect.update(iters=7), "iters: expected 7, got 3"),
        (lambda expect: expect["records"][1].pop("s"), "record 1 (iteration 1): s: expected None, got 2"),
    ],
    ids=["a record too few", "another total", "a key too few"],
)
def test_first_difference_in_words(change: object, words: str) -> None:
    ours = {"records": [{"i": i, "s": i + 1} for i in range(3)], "iters": 3, "stalled": False, "unfinished": []}
    theirs = copy.deepcopy(ours)
    assert callable(change)
    change(theirs)
    assert first_difference(ours, theirs) == words


def test_trace_files_stay_small_and_readable() -> None:
    for path in TRACES:
        assert path.stat().st_size < 60_000
        msgspec.json.decode(path.read_bytes())
