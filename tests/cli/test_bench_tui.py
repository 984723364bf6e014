"""The meter of `schedtop bench tui` on programs of known cost, and how peers are found."""

import os
import sys
from pathlib import Path

from schedtop.cli.bench_tui import PEERS, Report, in_words, peers
from schedtop.cli.screen_meter import Cost, Screen, measure

ENVIRONMENT = dict(os.environ)


def program(code: str, **fields) -> Screen:
    return Screen(name="it", command=[sys.executable, "-c", code], environment=ENVIRONMENT, size=(80, 24), **fields)


def test_what_a_program_writes_is_counted_by_refresh_and_by_second() -> None:
    code = "import sys,time\nprint('data')\nwhile 1: sys.stdout.write('x' * 100); sys.stdout.flush(); time.sleep(0.2)"
    cost = measure(program(code, first_data="data"), 0.5, 0)
    assert cost.fault == ""
    assert cost.first_data_cpu_s is not None
    assert cost.kilobytes_per_s
    assert cost.bytes_per_refresh
    assert cost.bytes_per_refresh >= 100
    assert cost.memory_mb
    assert cost.memory_mb > 1


def test_a_quiet_program_writes_nothing() -> None:
    cost = measure(program("import time; print('data', flush=True); time.sleep(600)", first_data="data"), 0.2, 0)
    assert cost.kilobytes_per_s == 0.0
    assert cost.refreshes_per_s == 0.0
    assert cost.bytes_per_refresh is None


def test_keys_are_timed_to_the_words_that_answer_them() -> None:
    code = (
        "import sys,tty\ntty.setraw(0)\nprint('data',flush=True)\nwhile 1: print('<'+sys.stdin.read(1)+'>',flush=True)"
    )
    cost = measure(program(code, first_data="data", key="?", answered_by="<?>", key_back="q"), 0.1, 2)
    assert cost.fault == ""
    assert cost.key_p50_s is not None
    assert cost.key_p99_s is not None
    assert cost.key_p50_s <= cost.key_p99_s


def test_a_program_that_ends_is_told_with_its_last_words() -> None:
    cost = measure(program("print('no such engine')", first_data="data"), 0.1, 0)
    assert "no such engine" in cost.fault
    assert cost.core_percent is None


def test_peers_that_are_not_installed_are_skipped_with_the_reason(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    (tmp_path / "vllmstat").write_text("#!/bin/sh\n")
    (tmp_path / "vllmstat").chmod(0o755)
    found, skipped = peers(str(tmp_path / "python"), "http://127.0.0.1:1", environment, (80, 24))
    assert [screen.command[1:] for screen in found] == [["--url", "http://127.0.0.1:1"]]
    assert set(skipped) == set(PEERS) - {"vllmstat"}
    assert peers(None, "", environment, (80, 24))[0] == []


def test_the_report_shows_a_dash_for_what_was_not_measured_and_why() -> None:
    rows = [Cost(name="a", core_percent=3.25, fault=""), Cost(name="b", fault="ended early: oops")]
    text = in_words(Report(requests=5, columns=120, lines=40, rows=rows, skipped={"c": "not installed"}))
    assert "3.2" in text
    assert "b: ended early: oops" in text
    assert "c: skipped, not installed" in text
