"""One time axis: what operators did above, what the scheduler did below, so that cause stands over effect. Pure."""

from collections.abc import Callable

from schedtop.engine.snapshot import EngineEvent, EventKind
from schedtop.tui.cells import Line, clean, cut, fit
from schedtop.tui.format import count, duration, spark, value_text
from schedtop.tui.state import Sample, Scene
from schedtop.tui.views.budget import SECONDS_PER_COLUMN, time_axis
from schedtop.tui.views.frame import Body
from schedtop.tui.views.lifeline import event_line

AXIS = 9
_LANES: tuple[tuple[str, str, str, tuple[EventKind, ...]], ...] = (
    ("knobs", "◆", "knob", (EventKind.KNOBS_CHANGED,)),
    (
        "operator",
        "●",
        "note",
        (EventKind.PRIORITY_CHANGED, EventKind.PAUSED, EventKind.UNPAUSED, EventKind.CACHE_RESET),
    ),
    ("refused", "✗", "bad", (EventKind.REFUSED,)),
    ("preempt", "▼", "preempted", (EventKind.PREEMPTED,)),
)
_SHOWN = (EventKind.KNOBS_CHANGED, EventKind.PAUSED, EventKind.UNPAUSED, EventKind.PRIORITY_CHANGED, EventKind.REFUSED,
          EventKind.PREEMPTED, EventKind.CACHE_RESET)  # fmt: skip


def timeline(scene: Scene, width: int, height: int) -> Body:
    """Lanes of marks, then waiting, running and the slowest step as columns, then the newest events in words."""
    columns = max(1, width - AXIS - 7)
    lines: list[Line] = [_lane(scene, label, glyph, role, kinds, columns) for label, glyph, role, kinds in _LANES]
    lines.append(_curve(scene, "waiting", "waiting", columns, lambda sample: float(sample.num_waiting), count))
    lines.append(_curve(scene, "running", "running", columns, lambda sample: float(sample.num_running), count))
    lines.append(_curve(scene, "step", "step_time", columns, lambda sample: sample.step_s_max, duration))
    lines.append(((" " * AXIS, "text"), (time_axis(columns), "dim")))
    recent = [event for event in reversed(scene.view.events) if event.kind in _SHOWN]
    lines += [_words(event, scene) for event in recent[: max(0, height - len(lines))]]
    return Body([fit(line, width) for line in lines[:height]], (("1 s per column", "dim"),))


def _place(scene: Scene, mono: float, columns: int) -> int:
    newest = int(scene.engine_now // SECONDS_PER_COLUMN)
    return columns - 1 - (newest - int(mono // SECONDS_PER_COLUMN))


def _lane(scene: Scene, label: str, glyph: str, role: str, kinds: tuple[EventKind, ...], columns: int) -> Line:
    numbers = [0] * columns
    for event in scene.view.events:
        place = _place(scene, event.mono, columns)
        if event.kind in kinds and 0 <= place < columns:
            numbers[place] += 1
    marks = "".join("·" if not n else glyph if n == 1 else str(n) if n < 10 else "+" for n in numbers)
    return ((cut(label, AXIS), "dim"), (marks, role if any(numbers) else "greyed"), (f" {sum(numbers):>6}", "text"))


def _curve(
    scene: Scene, label: str, role: str, columns: int, of: Callable[[Sample], float], words: Callable[[float], str]
) -> Line:
    values: list[float | None] = [None] * columns
    for sample in scene.view.samples:
        place = _place(scene, sample.mono, columns)
        if 0 <= place < columns:
            values[place] = max(values[place] or 0.0, of(sample))
    latest = next((value for value in reversed(values) if value is not None), 0.0)
    return ((cut(label, AXIS), "dim"), *spark(values, role), (f" {words(latest):>6}", "text"))


def _words(event: EngineEvent, scene: Scene) -> Line:
    if not event.changes:
        who = f"{clean(event.request_id)} " if event.request_id else ""
        line = event_line(event, scene.engine_now)
        return (*line[:-1], (who, "strong"), line[-1])
    changes = ", ".join(f"{name} {value_text(old)} → {value_text(new)}" for name, (old, new) in event.changes.items())
    return (*event_line(event, scene.engine_now)[:-1], (changes, "text"))
