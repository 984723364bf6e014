"""Exact latency percentiles: the last seconds beside the last minute. Pure."""

from schedtop.control.measures import Latency, Percentiles
from schedtop.tui.cells import Line, Span, cut, fit
from schedtop.tui.format import UNKNOWN, count
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body
from schedtop.tui.views.overview import LATENCY_NAMES, short

_NAME = 5
_CELL = 7


def latency(scene: Scene, width: int, height: int) -> Body:
    """One row per latency: p50, p90, p99 of the last 10 s and of the last minute."""
    latencies = scene.view.update.latencies if scene.view.update else {}
    heads = "".join(cut(head, _CELL, right=True) for head in ("p50", "p90", "p99"))
    wide = width >= _NAME + 6 * _CELL + 14
    top: list[Span] = [(" " * _NAME, "header"), (heads, "header"), (" " + heads, "header")]
    if wide:
        top.append((cut("max", _CELL, right=True) + cut("n", _CELL, right=True), "header"))
    lines: list[Line] = [fit(top, width, "header")]
    is_told = scene.view.update is not None
    lines += [fit(_row(name, latencies.get(name), wide, is_told), width) for name in LATENCY_NAMES]
    return Body(lines, (("10 s", "strong"), (" │ ", "border"), ("1 min", "strong")))


def _row(name: str, latency: Latency | None, wide: bool, is_told: bool) -> list[Span]:
    if not is_told:
        return [(cut(name, _NAME), "dim"), *_cells(None, "dim"), (" ", "text"), *_cells(None, "dim")]
    if latency is None:
        return [(cut(name, _NAME), "dim"), ("not exported by this engine", "dim")]
    spans: list[Span] = [(cut(name, _NAME), "text"), *_cells(latency.now, "strong"), (" ", "text")]
    spans += _cells(latency.minute, "text")
    if wide:
        minute = latency.minute
        spans.append((cut(short(minute.max) if minute else UNKNOWN, _CELL, right=True), "text"))
        spans.append((cut(count(minute.count) if minute else UNKNOWN, _CELL, right=True), "dim"))
    return spans


def _cells(values: Percentiles | None, role: str) -> list[Span]:
    if values is None:
        return [(cut(UNKNOWN, _CELL, right=True), "dim")] * 3
    return [(cut(short(value), _CELL, right=True), role) for value in (values.p50, values.p90, values.p99)]
