"""What a playbook file may say, and what is said about one that doesn't."""

from pathlib import Path

import pytest

from schedtop.control.playbook.reader import BadPlaybook, load_playbook, parse_playbook
from schedtop.control.playbook.shipped import find_playbook, shipped_playbooks

HEAD = "name: x\nsteps:\n  - wait: 1s\n"


@pytest.mark.parametrize("path", shipped_playbooks(), ids=lambda path: path.stem)
def test_shipped_playbooks_load_and_say_what_they_are_for(path: Path) -> None:
    playbook = load_playbook(path)
    assert playbook.name == path.stem
    assert playbook.description and playbook.checks


def test_there_are_shipped_playbooks_and_they_are_found_by_name() -> None:
    assert find_playbook("short-prompts-first") in shipped_playbooks()
    with pytest.raises(BadPlaybook, match="did you mean 'short-prompts-first'"):
        find_playbook("short-prompt-first")


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", ":1:1", "the file is empty"),
        ("name: x", ":1:1", "missing required field `steps`"),
        ("name: x\nname: y", ":2:1", "stands twice"),
        ("name: x\nsteps: [", ":2:9", "node content"),
        ("name: x\nsteps:\n  - wat: 3s", ":3:5", "did you mean 'wait'?"),
        ("name: x\nsteps:\n  - wait: soon", ":3:11", "'soon' is no duration"),
        ("name: x\nsteps:\n  - {wait: 1s, set: {policy: fcfs}}", ":3:5", "exactly one of"),
        ("name: x\nsteps:\n  - set: {max_num_seq: 3}", ":3:11", "did you mean 'max_num_seqs'?"),
        ("name: x\nsteps:\n  - pause: hard", ":3:12", "modes abort, wait and keep"),
        ("name: x\nsteps:\n  - set: {max_num_batched_tokens: budget_for(soon)}", ":3:46", "budget_for(80ms)"),
        (HEAD + "checks:\n  - {expect: running < 3, on_fail: panic}", ":5:36", "rollback, hold or ignore"),
        (HEAD + "checks:\n  - {expect: running < 3, min_samples: 0}", ":5:40", "below its minimum 1"),
        (HEAD + "checks:\n  - expect: itl_p9_ms < 3", ":5:13", "did you mean"),
        (HEAD + "checks:\n  - expect: running < 3 ms", ":5:23", "doesn't fit a signal in requests"),
        (HEAD + "checks:\n  - expect: __import__('os')", ":5:23", "can't read"),
        (HEAD + "checks:\n  - expect: running < 3 over 5%", ":5:30", "no duration"),
    ],
)
def test_a_mistake_is_refused_with_its_place(text: str, place: str, words: str) -> None:
    with pytest.raises(BadPlaybook) as refusal:
        parse_playbook(text, "f.yaml")
    assert str(refusal.value).startswith(f"f.yaml{place}: ")
    assert words in str(refusal.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadPlaybook, match=r"missing\.yaml"):
        load_playbook(tmp_path / "missing.yaml")
