"""The state of an engine as plain text or JSON, once: for scripts, pipes and dumb terminals. Loads no Textual.

What the JSON holds is `State`; its schema lies in `docs/reference/state.schema.json`. Within one number of `schema`
fields are only added.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from schedtop.control.client import Client
from schedtop.control.measures import Latency
from schedtop.control.messages import EngineInfo, GetSnapshot, PendingChange, SnapshotReply
from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import EngineCoreEvent, Snapshot, Viewport
from schedtop.tui.advisor import find
from schedtop.tui.alerts import find_alerts
from schedtop.tui.cells import ASCII, Line, plain
from schedtop.tui.drawing import draw
from schedtop.tui.format import value_text
from schedtop.tui.layout import COMPACT_STRIPS, Place
from schedtop.tui.state import EngineView, LinkUp, Received, Scene, Ui, fold
from schedtop.tui.views.frame import Frame

SCHEMA = 1
_STRIPS = COMPACT_STRIPS
_ROWS = 40


async def read_scene(target: str) -> Scene:
    """Connect, take one snapshot, disconnect. Raises `Disconnected` or `CommandRefused`."""
    async with await Client.connect(target, name="tui", read_only=True) as client:
        reply = await client.request(GetSnapshot(viewport=Viewport(running_rows=_ROWS, waiting_rows=_ROWS)))
        assert isinstance(reply, SnapshotReply)
        view = fold(EngineView(target), LinkUp(target, client.welcome), 0.0)
        return Scene(fold(view, Received(target, reply.update), 0.0), Ui(focus="", is_read_only=True), 0.0)


def as_text(scene: Scene, width: int, is_ascii: bool = False) -> str:
    """The state in lines of at most `width` cells, without colours."""
    snapshot = scene.view.snapshot
    assert snapshot is not None
    lines = [_strip("identity", scene, width)]
    lines += [f"{alert.glyph} {alert.text}" for alert in find_alerts(scene)]
    lines += [_strip(name, scene, width) for name in _STRIPS]
    rows = 2 + min(_ROWS, len(snapshot.running)) + 1 + min(_ROWS, len(snapshot.waiting))
    lines += _panel("requests", scene, width, rows)
    if snapshot.recent_preemptions:
        lines += _panel("decisions", scene, width, 2 + min(5, len(snapshot.recent_preemptions)))
    lines.append(
        "knobs  " + " ".join(f"{n}={value_text(v)}" for n, v in msgspec.structs.asdict(snapshot.knobs).items())
    )
    lines += [f"advice  {f.name}: {f.evidence} → {f.advice} {_changes(f.changes)}" for f in find(scene)]
    text = "\n".join(line.rstrip() for line in lines)
    return text.translate(ASCII) if is_ascii else text


def _changes(changes: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value_text(value)}" for name, value in changes.items())


def _strip(name: str, scene: Scene, width: int) -> str:
    return plain(draw(name, scene, Place(0, 0, width, 1), {})[0])


def _panel(name: str, scene: Scene, width: int, height: int) -> list[str]:
    place = Place(0, 0, width, height, Frame.RULE)
    unmarked = replace(scene, ui=replace(scene.ui, cursor=None))
    lines: list[Line] = draw(name, unmarked, place, {})
    return [plain(line).replace("›", " ", 1) for line in lines if plain(line).strip()]


class ToldAlert(msgspec.Struct, frozen=True, kw_only=True):
    """What must not be missed. `severity`: down, bad, warn, note."""

    severity: str
    name: str
    text: str


class ToldFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the advisor. `changes`: the knobs it would stage; empty when no knob helps."""

    name: str
    evidence: str
    advice: str
    changes: dict[str, KnobValue]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment, as `schedtop --once --json` prints it. Times in seconds."""

    schema: int
    """Of this document: 1."""
    info: EngineInfo
    snapshot: Snapshot
    latencies: dict[str, Latency]
    """ttft, itl, e2e, queue, step: exact percentiles over 10 s and 60 s; null = no sample in that window."""
    alerts: list[ToldAlert]
    """Worst first."""
    findings: list[ToldFinding]
    """Most pressing first."""
    pending_change: PendingChange | None = None
    """A change that will be undone unless confirmed."""


class FrameState(State, frozen=True, kw_only=True):
    """One frame of a recording, as `schedtop replay FILE --json` prints it, a line each."""

    frame: int
    """Its place, from 0."""
    wall: float
    events: list[EngineCoreEvent]
    """Since the frame before."""


def as_json(scene: Scene) -> str:
    """The state as one JSON document."""
    return msgspec.json.format(msgspec.json.encode(state(scene)), indent=2).decode()


def frame_as_json(scene: Scene, frame: int, wall: float, events: list[EngineCoreEvent]) -> bytes:
    """A frame of a recording as one line of JSON."""
    fields = msgspec.structs.asdict(state(scene))
    return msgspec.json.encode(FrameState(frame=frame, wall=wall, events=events, **fields))


def state(scene: Scene) -> State:
    """What becomes the JSON document."""
    update, welcome = scene.view.update, scene.view.welcome
    assert update is not None
    assert welcome is not None
    return State(
        schema=SCHEMA,
        info=welcome.info,
        snapshot=update.snapshot,
        latencies=update.latencies,
        alerts=[ToldAlert(severity=a.severity.name.lower(), name=a.name, text=a.text) for a in find_alerts(scene)],
        findings=[
            ToldFinding(name=f.name, evidence=f.evidence, advice=f.advice, changes=dict(f.changes)) for f in find(scene)
        ],
        pending_change=update.pending_change,
    )


def schema() -> str:
    """JSON Schema of both documents."""
    _, parts = msgspec.json.schema_components([State, FrameState])
    return msgspec.json.format(msgspec.json.encode({
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "schedtop --once --json",
        "$ref": "#/$defs/State", "$defs": {name.replace("~1", "/"): part for name, part in parts.items()},
    }), indent=2).decode() + "\n"  # fmt: skip
