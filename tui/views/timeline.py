"""One time axis: what operators did above, what the scheduler did below, so that cause stands over effect. Pure."""

from collections.abc import Callable
from itertools import groupby, pairwise

from schedtop.engine.snapshot import EngineCoreEvent, EventKind, Preemption
from schedtop.tui.cells import Line, Span, clean, cut, fit
from schedtop.tui.format import age, count, spark, value_text
from schedtop.tui.state import Sample, Scene
from schedtop.tui.views.budget import columns_at, time_axis
from schedtop.tui.views.frame import Body
from schedtop.tui.views.overview import short, whom

AXIS = 9
_TOTAL = 8
_LANES: tuple[tuple[str, str, str, tuple[EventKind, ...]], ...] = (
    ("knobs", "◆", "knob", (EventKind.KNOBS_CHANGED,)),
    (
        "operator",
        "●",
        "note",
        (EventKind.PRIORITY_CHANGED, EventKind.PAUSED, EventKind.UNPAUSED, EventKind.CACHE_RESET),
    ),
    ("refused", "✗", "bad", (EventKind.REFUSED,)),
)
_IN_WORDS = (
    EventKind.KNOBS_CHANGED,
    EventKind.PAUSED,
    EventKind.UNPAUSED,
    EventKind.PRIORITY_CHANGED,
    EventKind.REFUSED,
    EventKind.CACHE_RESET,
)


def timeline(scene: Scene, width: int, height: int) -> Body:
    """Lanes of marks, then waiting, running and the slowest step as columns, then the newest events in words."""
    columns = max(1, width - AXIS - _TOTAL)
    lines = [
        _lane(label, glyph, role, _events_per_column(scene, kinds, columns)) for label, glyph, role, kinds in _LANES
    ]
    lines.append(_lane("preempt", "▼", "preempted", _preemptions_per_column(scene, columns)))
    lines.append(_lane("alerts", "!", "bad", _alerts_per_column(scene, columns), len(_standing(scene))))
    lines.append(_curve(scene, "waiting", "waiting", columns, lambda sample: float(sample.num_waiting), count))
    lines.append(_curve(scene, "running", "running", columns, lambda sample: float(sample.num_running), count))
    lines.append(_curve(scene, "step", "step_time", columns, lambda sample: sample.step_s_max, short))
    lines.append(((" " * AXIS, "text"), (time_axis(columns), "dim")))
    lines += _words(scene)[: max(0, height - len(lines))]
    return Body([fit(line, width) for line in lines[:height]], (("cause above effect · 1 s per column", "dim"),))


def _events_per_column(scene: Scene, kinds: tuple[EventKind, ...], columns: int) -> list[int]:
    numbers = [0] * columns
    place_of = columns_at(scene.engine_now, columns)
    for event in scene.view.events:
        if event.kind in kinds and (place := place_of(event.mono)) >= 0:
            numbers[place] += 1
    return numbers


def _preemptions_per_column(scene: Scene, columns: int) -> list[int]:
    """From the step records, which reach back further than this screen's own events."""
    numbers = [0] * columns
    place_of = columns_at(scene.engine_now, columns)
    for sample in reversed(scene.view.samples):
        if (place := place_of(sample.mono)) < 0:
            break
        numbers[place] += sample.preemptions
    return numbers


def _lane(label: str, glyph: str, role: str, numbers: list[int], total: int | None = None) -> Line:
    """Marks per column; at the right end their sum, or `total`."""
    spans: list[Span] = [(cut(label, AXIS), "dim")]
    for is_empty, group in groupby(numbers, key=lambda number: not number):
        marks = "".join("·" if is_empty else glyph if n == 1 else str(n) if n < 10 else "+" for n in group)
        spans.append((marks, "greyed" if is_empty else role))
    told = sum(numbers) if total is None else total
    return (*spans, (f" {count(told):>{_TOTAL - 1}}", "text" if told else "dim"))


def _alerts_per_column(scene: Scene, columns: int) -> list[int]:
    """How many alerts stood at once in each column; newly raised ones are named in the words below."""
    numbers = [0] * columns
    place_of = columns_at(scene.engine_now, columns)
    for sample in reversed(scene.view.samples):
        if (place := place_of(sample.mono)) < 0:
            break
        numbers[place] = max(numbers[place], len(sample.alerts))
    return numbers


def _standing(scene: Scene) -> tuple[str, ...]:
    return scene.view.samples[-1].alerts if scene.view.samples else ()


def _raised(scene: Scene) -> list[tuple[float, str]]:
    """When each alert began, among the samples at hand, oldest first."""
    pairs = pairwise(scene.view.samples)
    return [(new.mono, name) for old, new in pairs for name in new.alerts if name not in old.alerts]


def _curve(
    scene: Scene, label: str, role: str, columns: int, of: Callable[[Sample], float], words: Callable[[float], str]
) -> Line:
    values: list[float | None] = [None] * columns
    place_of = columns_at(scene.engine_now, columns)
    for sample in reversed(scene.view.samples):
        if (place := place_of(sample.mono)) < 0:
            break
        values[place] = max(values[place] or 0.0, of(sample))
    latest = next((value for value in reversed(values) if value is not None), 0.0)
    return ((cut(label, AXIS), "dim"), *spark(values, role), (f" {words(latest):>{_TOTAL - 1}}", "text"))


def _words(scene: Scene) -> list[Line]:
    """What operators did, who was preempted and which alerts came up, the newest first."""
    now, snapshot = scene.engine_now, scene.view.snapshot
    told: list[tuple[float, Line]] = [
        (event.mono, _event_words(event, now)) for event in scene.view.events if event.kind in _IN_WORDS
    ]
    for preemption in snapshot.recent_preemptions if snapshot else []:
        told.append((preemption.mono, _preemption_words(preemption, now)))
    told += [(mono, _alert_words(name, now - mono)) for mono, name in _raised(scene)]
    return [line for _, line in sorted(told, key=lambda pair: -pair[0])]


def _alert_words(name: str, ago_s: float) -> Line:
    return ((f"{age(max(0.0, ago_s)):>6} ago ", "dim"), ("alert ", "bad"), (name, "text"))


def _preemption_words(preemption: Preemption, now: float) -> Line:
    return (
        (f"{age(max(0.0, now - preemption.mono)):>6} ago ", "dim"),
        ("preempted ", "preempted"),
        (clean(preemption.victim), "strong"),
        (f" for {whom(preemption)}, {count(preemption.num_lost_tokens)} tokens lost", "text"),
    )


def _event_words(event: EngineCoreEvent, now: float) -> Line:
    ago: Span = (f"{age(max(0.0, now - event.mono)):>6} ago ", "dim")
    if event.changes:
        pairs = event.changes.items()
        changes = ", ".join(f"{name} {value_text(old)} → {value_text(new)}" for name, (old, new) in pairs)
        return (ago, ("set ", "knob"), (changes, "text"))
    who = f" {clean(event.request_id)}" if event.request_id else ""
    return (ago, (event.kind.value.replace("_", " "), "note"), (who, "strong"), (f" {clean(event.detail)}", "text"))
