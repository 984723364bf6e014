"""What a playbook file may say, and what is said about one that doesn't."""

from datetime import datetime
from pathlib import Path

import pytest

from schedtop.control.playbook.reader import BadPlaybook, load_playbook, parse_playbook
from schedtop.control.playbook.schedule import parse_schedule
from schedtop.control.playbook.schema import Playbook, json_schema
from schedtop.control.playbook.shipped import find_playbook, shipped_playbooks
from schedtop.engine.knobs import KNOB_NAMES

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
        (HEAD + "checks:\n  - expect: 'kv_usage > 1.5'", ":5:25", "is a share from 0 to 1"),
        (HEAD + "checks:\n  - expect: waiting < 0", ":5:23", "never true"),
        (HEAD + "checks:\n  - {expect: running < 3, max_errors: 0}", ":5:39", "below its minimum 1"),
        (HEAD + "schedule: at night", ":4:11", "write 22:00-06:00"),
        (HEAD + "schedule: 22:00-22:00", ":4:11", "same minute"),
        (HEAD + "timezone: Mars/Base", ":4:11", "no time zone"),
        ("name: x\nsteps: []", ":2:8", "give at least one step"),
        ("name: a b\nsteps:\n  - wait: 1s", ":1:7", "is no name"),
        ("name: x\nsteps:\n  - set: {}", ":3:10", "no knob is named"),
        ("name: x\nsteps:\n  - set: {max_num_seqs: 0}", ":3:25", "below its minimum 1"),
        ("name: x\nsteps:\n  - set: {policy: fifo}", ":3:19", "not one of fcfs, priority"),
        ("name: x\nsteps:\n  - set: {max_num_seqs: runing / 2}", ":3:25", "did you mean 'running'?"),
        ("name: x\nsteps:\n  - set: {max_num_seqs: 2}\n    within: {min: 9, max: 3}", ":4:13", "nothing is within"),
        (
            "name: x\nsteps:\n  - sweep: {knob: watermark, values: [0.1], keep: running > 1, best: ttft}",
            ":3:70",
            "lowest SIGNAL",
        ),
        ("name: x\nsteps:\n  - wait: !!python/object:os.system x", ":3:11", "constructor"),
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


def test_aliases_that_grow_without_bound_and_deep_nesting_are_refused() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in ("ab", "bc", "cd", "de", "ef")
    )
    for text, words in ((bomb, "aliases counted"), ("[" * 30_000, "f.yaml:1:"), ("x" * 70_000, "the limit is")):
        with pytest.raises(BadPlaybook, match=words):
            parse_playbook(text, "f.yaml")


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22:00-06:00", ["2026-01-05T22:00", "2026-01-06T05:59"], ["2026-01-05T21:59", "2026-01-06T06:00"]),
        ("mon-fri 08:00-18:30", ["2026-01-09T18:29"], ["2026-01-10T12:00", "2026-01-09T18:30"]),
        ("fri 22:00-06:00", ["2026-01-10T05:00"], ["2026-01-09T05:00", "2026-01-10T22:30"]),
        ("sat-mon 00:00-24:00", ["2026-01-11T12:00", "2026-01-12T23:59"], ["2026-01-13T00:00"]),
    ],
)
def test_hours_belong_to_the_day_on_which_they_begin(text: str, inside: list[str], outside: list[str]) -> None:
    schedule = parse_schedule(text, "UTC")
    for moments, is_open in ((inside, True), (outside, False)):
        for moment in moments:
            assert schedule.is_open(datetime.fromisoformat(f"{moment}+00:00").timestamp()) is is_open, moment


def test_the_json_schema_for_editors_knows_every_knob_field_and_choice() -> None:
    schema = json_schema()
    assert set(schema["$defs"]["Step"]["properties"]["set"]["properties"]) == set(KNOB_NAMES)
    assert set(schema["$defs"]["Playbook"]["properties"]) == set(Playbook.__struct_encode_fields__)
    assert schema["$defs"]["Check"]["properties"]["on_fail"]["enum"] == ["rollback", "hold", "ignore"]
