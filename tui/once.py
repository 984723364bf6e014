"""The state of an engine as plain text or JSON, once: for scripts, pipes and dumb terminals. Loads no Textual.

JSON, schema 1: `schema`; `info` (who the engine is); `snapshot`; `latencies` (seconds); `alerts` (severity, text);
`findings` (name, evidence, advice, changes). Fields are those of `schedtop.engine.snapshot` and `control.messages`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from schedtop.control.client import Client
from schedtop.control.messages import GetSnapshot, SnapshotReply
from schedtop.engine.snapshot import Viewport
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


def as_json(scene: Scene) -> str:
    """The state as one JSON document (see the head of this file)."""
    return msgspec.json.format(msgspec.json.encode(document(scene)), indent=2).decode()


def document(scene: Scene) -> dict[str, Any]:
    """The state as what becomes the JSON document."""
    update = scene.view.update
    welcome = scene.view.welcome
    assert update is not None
    assert welcome is not None
    to_builtins: Callable[[Any], Any] = msgspec.to_builtins
    return {
        "schema": SCHEMA,
        "info": to_builtins(welcome.info),
        "snapshot": to_builtins(update.snapshot),
        "latencies": to_builtins(update.latencies),
        "alerts": [{"severity": alert.severity.name.lower(), "text": alert.text} for alert in find_alerts(scene)],
        "findings": [
            {"name": f.name, "evidence": f.evidence, "advice": f.advice, "changes": dict(f.changes)}
            for f in find(scene)
        ],
    }
