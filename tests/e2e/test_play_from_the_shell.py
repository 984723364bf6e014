"""`schedtop play` against a served engine: exit statuses, the report, and a roll-back when it is interrupted."""

import json
import signal
from pathlib import Path

import pytest
from processes import Served

pytestmark = pytest.mark.e2e

BOOK = """
name: shell
steps:
  - set: {max_num_seqs: 3}
  - wait: 300ms
checks:
  - {expect: running == 0 over 500ms, on_fail: rollback}
  - {expect: %s over 500ms, on_fail: rollback, on_no_data: rollback}
"""


def write(served: Served, condition: str, wait: str = "300ms") -> str:
    file = Path(served.home.folder) / "book.yaml"
    file.write_text((BOOK % condition).replace("300ms", wait))
    return str(file)


def test_results_and_exit_statuses(served: Served) -> None:
    for condition, status, result, value in (
        ("waiting > 0", 3, "fail", 16),
        ("itl_p99_ms < 5", 4, "no data", 16),
        ("waiting == 0", 0, "pass", 3),
    ):
        run = served.home.schedtop("play", write(served, condition), "--json")
        report = json.loads(run.stdout)
        assert (run.returncode, report["result"]) == (status, result), run.stderr
        assert served.snapshot().knobs.max_num_seqs == value
    actions = [row["action"] for row in served.home.json("audit", "--json")]
    assert [name for name in actions if "Lease" not in name][:3] == ["SetKnobs", "UndoChange", "SetKnobs"]


def test_a_dry_run_changes_nothing_and_a_mistake_names_its_place(served: Served) -> None:
    run = served.home.schedtop("play", "--dry-run", write(served, "waiting == 0"))
    assert run.returncode == 0 and "[change: max_num_seqs 16 -> 3; no forecast: too few steps" in run.stdout
    assert served.snapshot().generation == 0
    run = served.home.schedtop("play", write(served, "wating == 0"))
    assert run.returncode == 1
    assert "book.yaml:8:14: there is no signal called 'wating'; did you mean 'waiting'?" in run.stderr


def test_an_interrupted_playbook_takes_its_changes_back(served: Served) -> None:
    process = served.home.start("play", write(served, "waiting == 0", wait="1h"), log="play.log")
    served.wait_for(lambda snapshot: snapshot.knobs.max_num_seqs == 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    assert process.stdout is not None
    process.stdout.close()
    assert served.snapshot().knobs.max_num_seqs == 16
