"""The state as text and as JSON, for scripts, pipes and dumb terminals."""

import json

import pytest
from jsonschema_rs import ValidationError, validator_for
from rich.cells import cell_len

from schedtop.control.messages import SnapshotUpdate
from schedtop.engine.snapshot import Viewport
from schedtop.tui import once
from schedtop.tui.state import EngineView, LinkUp, Received, Scene, Ui, fold


@pytest.fixture
def scene_of():
    """What `read_scene` brings from a link's engine."""

    def made(link) -> Scene:
        view = fold(EngineView(link.target), LinkUp(link.target, link.welcome()), 0.0)
        update = SnapshotUpdate(snapshot=link.core.snapshot(Viewport()), latencies=link.latencies())
        return Scene(fold(view, Received(link.target, update), 0.0), Ui(focus="", is_read_only=True), 0.0)

    return made


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_text_holds_every_request_and_no_escape_code(scene_of, busy_link, width: int) -> None:
    text = once.as_text(scene_of(busy_link), width)
    for row in [*busy_link.core.snapshot(Viewport()).running, *busy_link.core.snapshot(Viewport()).waiting]:
        assert row.request_id in text
    assert "\x1b" not in text
    table = text.split("requests", 1)[1].split("knobs  ")[0]
    assert all(cell_len(line) <= width for line in table.splitlines()[1:])


def test_text_of_an_idle_engine_says_so(scene_of, engine_link) -> None:
    assert "idle: no request is running or waiting" in once.as_text(scene_of(engine_link), 80)


def test_what_cannot_be_told_from_one_snapshot_is_a_dash_not_a_zero(scene_of, busy_link) -> None:
    text = once.as_text(scene_of(busy_link), 110)
    assert "– tok/s" in text
    assert "–/s" in next(line for line in text.splitlines() if line.startswith("preempted"))


def test_ascii_text_is_ascii(scene_of, busy_link) -> None:
    assert once.as_text(scene_of(busy_link), 120, is_ascii=True).isascii()


def test_json_follows_its_schema(scene_of, busy_link) -> None:
    document = json.loads(once.as_json(scene_of(busy_link)))
    assert document["schema"] == 1
    snapshot = busy_link.core.snapshot(Viewport())
    assert document["snapshot"]["num_running"] == snapshot.num_running
    assert document["snapshot"]["waiting_by_reason"] == snapshot.waiting_by_reason
    assert document["snapshot"]["knobs"]["max_num_seqs"] == 16
    assert document["latencies"]["ttft"]["minute"]["count"] > 0
    assert {finding["name"] for finding in document["findings"]} >= {"head of line"}
    validator = validator_for(json.loads(once.schema()))
    validator.validate(document)
    with pytest.raises(ValidationError):
        validator.validate(document | {"snapshot": {**document["snapshot"], "num_running": "many"}})


def test_json_of_an_idle_engine_follows_the_schema_and_lacks_what_nobody_knows(scene_of, engine_link) -> None:
    document = json.loads(once.as_json(scene_of(engine_link)))
    validator_for(json.loads(once.schema())).validate(document)
    assert document["latencies"]["ttft"] == {"now": None, "minute": None}
    assert document["snapshot"]["last_step"] is None
    assert document["alerts"] == document["findings"] == []


def test_a_frame_of_a_recording_follows_the_schema_too(scene_of, busy_link) -> None:
    schema = json.loads(once.schema())
    frame = json.loads(once.frame_as_json(scene_of(busy_link), 3, 12.5, []))
    validator_for({**schema, "$ref": "#/$defs/FrameState"}).validate(frame)
    assert (frame["frame"], frame["wall"], frame["events"]) == (3, 12.5, [])
