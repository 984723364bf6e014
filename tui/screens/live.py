"""Dialogs that go on showing live data: one request from close by, and the fleet."""

from collections.abc import Callable, Sequence

from textual import events

from schedtop.tui.alerts import find_alerts
from schedtop.tui.cells import Line, Span, clean, cut, fit
from schedtop.tui.format import UNKNOWN, age, bar, count, percent, rate
from schedtop.tui.screens.dialog import Dialog
from schedtop.tui.state import EngineView, Phase, Scene, rates
from schedtop.tui.views.kv import kv_cells
from schedtop.tui.views.lifeline import lifeline
from schedtop.tui.views.overview import kv_counts
from schedtop.tui.widgets.panel import StyleOf


class DetailDialog(Dialog[None]):
    """One request: facts, life, blocks, events."""

    wanted_width = 110
    wanted_height = 24
    is_steady = True

    def __init__(self, styles: StyleOf, is_ascii: bool, request_id: str, scene: Callable[[], Scene]) -> None:
        super().__init__(styles, is_ascii)
        self.heading = f"request {clean(request_id)}"
        self._request_id = request_id
        self._scene = scene

    def body(self, width: int) -> list[Line]:
        """The lifeline, then the KV map with this request's blocks lit."""
        scene = self._scene()
        snapshot = scene.view.snapshot
        detail = snapshot.detail if snapshot else None
        if snapshot is None or detail is None or detail.request_id != self._request_id:
            gone = snapshot is not None and snapshot.detail is None
            return [(("this request is no longer live" if gone else "asking the engine …", "dim"),)]
        events = len(detail.events)
        lines = list(lifeline(scene, width, 100).lines)
        head, told = lines[: len(lines) - events], lines[len(lines) - events :]
        which = _ranges(detail.block_ids) or ("which ones is not in the recording" if scene.ui.playback else "")
        blocks: list[Span] = [(f"{detail.row.num_blocks} blocks  ", "strong"), (which, "dim")]
        map_lines = kv_cells(snapshot.kv_map, width, 8) if snapshot.kv_map else []
        return [*head, (), fit(blocks, width), *map_lines, (), (("events", "title"),), *told]


def _ranges(ids: Sequence[int]) -> str:
    """Block ids, runs joined.

    >>> _ranges([3, 4, 5, 9, 7, 8])
    '3-5 9 7-8'
    """
    runs: list[list[int]] = []
    for block in ids:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class FleetDialog(Dialog[str]):
    """All engines, one row each, never summed. Answers the target to drill into."""

    heading = "fleet"
    wanted_width = 150

    def __init__(
        self, styles: StyleOf, is_ascii: bool, views: Callable[[], Sequence[EngineView]], clock: Callable[[], float]
    ) -> None:
        super().__init__(styles, is_ascii)
        self._views = views
        self._clock = clock
        self._index = 0

    def body(self, width: int) -> list[Line]:
        """A header and a row per engine."""
        now = self._clock()
        head = (
            f"  {'engine':<16} {'state':<12} {'run':>9} {'wait':>6} {'kv':>5} {'':<16} {'tok/s':>6} {'pre/s':>6}  alert"
        )
        lines: list[Line] = [fit([(head, "header")], width, "header")]
        for place, view in enumerate(self._views()):
            line = fit(fleet_row(Scene(view, now=now)), width)
            lines.append(tuple((text, f"{role}+cursor") for text, role in line) if place == self._index else line)
        return lines

    async def on_plain_key(self, event: events.Key) -> bool:
        """Arrows choose, Enter drills in."""
        views = self._views()
        if event.key in ("down", "j", "up", "k"):
            self._index = max(0, min(len(views) - 1, self._index + (1 if event.key in ("down", "j") else -1)))
            self.repaint()
        elif event.key == "enter" and views:
            self.dismiss(views[self._index].target)
        else:
            return False
        return True

    def on_line_clicked(self, line: int) -> None:
        """A click drills in."""
        views = self._views()
        if 1 <= line <= len(views):
            self.dismiss(views[line - 1].target)


def fleet_row(scene: Scene) -> list[Span]:
    """One engine in one row; what it doesn't tell is a dash."""
    view, snapshot = scene.view, scene.view.snapshot
    name = view.welcome.info.name if view.welcome else view.target
    alerts = find_alerts(scene)
    worst: Span = (f"  {alerts[0].glyph} {alerts[0].text}", alerts[0].role) if alerts else ("  ✓", "dim")
    spans: list[Span] = [("  ", "text"), (cut(clean(name), 16), "strong"), (" ", "text"), _state(scene)]
    if snapshot is None:
        return [*spans, (f" {UNKNOWN:>9} {UNKNOWN:>6} {UNKNOWN:>5} {'':<16} {UNKNOWN:>6} {UNKNOWN:>6}", "dim"), worst]
    speed = rates(view, scene.now)
    role = "stale" if scene.is_stale else "text"
    parts = [
        (float(amount), glyph, "stale" if scene.is_stale else name)
        for amount, glyph, name, _ in kv_counts(snapshot.pool)
    ]
    return [
        *spans,
        (f" {snapshot.num_running:>4}/{snapshot.knobs.max_num_seqs:<4}", role),
        (f" {count(snapshot.num_waiting):>6}", role),
        (f" {percent(snapshot.pool.in_use, snapshot.pool.usable):>5} ", role),
        *bar(parts, 16),
        (f" {rate(speed.generated if speed else None):>6} {rate(speed.preemptions if speed else None):>6}", role),
        worst,
    ]


def _state(scene: Scene) -> Span:
    match scene.view.phase:
        case Phase.LOST:
            return f"✗ {age(scene.now - scene.view.changed_at):<10}", "bad"
        case Phase.CONNECTING:
            return "… connecting", "dim"
    return (f"stale {age(scene.view.age(scene.now)):<6}", "warn") if scene.is_stale else ("● live      ", "good")
