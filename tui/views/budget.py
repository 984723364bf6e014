"""The token budget over time: stacked prefill and decode, what stayed unused, knob changes as marks. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from schedtop.engine.snapshot import EventKind
from schedtop.tui.cells import Line, Span, cut, fit
from schedtop.tui.format import count, duration, spark, stacked
from schedtop.tui.state import EngineView, Scene
from schedtop.tui.views.frame import Body
from schedtop.tui.views.overview import budget_line

AXIS = 6
SECONDS_PER_COLUMN = 1.0
_WITH_KNOB = 60
"""Room from which the title says where the budget is changed."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Mean tokens per step over one column of time."""

    budget: float = 0.0
    decode: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    step_s: float | None = None


def buckets(view: EngineView, engine_now: float, columns: int, seconds: float = SECONDS_PER_COLUMN) -> list[Bucket]:
    """The newest `columns` columns of time, the newest last; borders lie on whole multiples of `seconds`."""
    newest = int(engine_now // seconds)
    sums: dict[int, list[float]] = {}
    for sample in reversed(view.samples):
        place = int(sample.mono // seconds)
        if place <= newest - columns:
            break
        if not sample.num_steps:
            continue
        total = sums.setdefault(place, [0.0] * 6)
        for i, amount in enumerate((sample.num_steps, sample.budget, sample.decode, sample.prefill, sample.draft)):
            total[i] += amount
        total[5] = max(total[5], sample.step_s_max)
    found = [_bucket(sums.get(place)) for place in range(newest - columns + 1, newest + 1)]
    return _spread(found, seconds)


def _spread(found: list[Bucket], seconds: float) -> list[Bucket]:
    """A step longer than a column is drawn in each column that it took, not only in the one where it ended."""
    for place in range(len(found) - 1, 0, -1):
        if found[place - 1] == Bucket() and (found[place].step_s or 0.0) > seconds:
            longer = found[place]
            found[place - 1] = replace(longer, step_s=(longer.step_s or 0.0) - seconds)
    return found


def _bucket(total: list[float] | None) -> Bucket:
    if total is None:
        return Bucket()
    steps = total[0]
    return Bucket(total[1] / steps, total[2] / steps, total[3] / steps, total[4] / steps, total[5])


def budget(scene: Scene, width: int, height: int) -> Body:
    """The last step as a bar, then tokens per step over time, knob changes, slowest step of each second."""
    snapshot = scene.view.snapshot
    if snapshot is None:
        return Body([])
    columns = max(1, width - AXIS)
    history = buckets(scene.view, scene.engine_now, columns)
    top = max([bucket.budget for bucket in history] + [float(snapshot.knobs.max_num_batched_tokens)])
    rows = max(1, height - 4)
    lines: list[Line] = [budget_line(snapshot, width)]
    lines += _plot(history, rows, top)
    lines.append(fit([(cut("knobs", AXIS), "dim"), *_marks(scene, columns)], width))
    times = [bucket.step_s for bucket in history]
    slowest = max((time for time in times if time is not None), default=None)
    lines.append(fit([(cut("step", AXIS), "dim"), *spark(times, "step_time")], width))
    lines.append(fit([(cut("", AXIS), "dim"), (time_axis(columns), "dim")], width))
    title: list[Span] = [("slowest step ", "dim"), (duration(slowest), "strong")]
    if width >= _WITH_KNOB and not scene.ui.is_read_only:
        title += [(" · ", "dim"), ("5", "key"), (" changes it", "dim")]
    return Body(lines, tuple(title))


def _plot(history: list[Bucket], rows: int, top: float) -> list[Line]:
    columns = [(b.decode, b.prefill, b.draft) for b in history]
    drawn = stacked(columns, ("decode", "prefill", "draft"), rows, top)
    lines: list[Line] = []
    for place, spans in enumerate(drawn):
        floor = (rows - 1 - place) * top / rows
        label = count(top) if place == 0 else count(top / 2) if place == rows // 2 and rows > 3 else ""
        lines.append(((cut(label, AXIS - 1, right=True) + " ", "dim"), *_with_unused(spans, history, floor)))
    return lines


def _with_unused(spans: list[Span], history: list[Bucket], floor: float) -> list[Span]:
    """Blank cells below a column's budget become dots: the part of the budget that stayed unused."""
    filled: list[Span] = []
    place = 0
    for text, role in spans:
        if role != "text":
            filled.append((text, role))
        else:
            dots = "".join("·" if history[place + i].budget > floor else " " for i in range(len(text)))
            filled.append((dots, "unused"))
        place += len(text)
    return filled


def columns_at(engine_now: float, columns: int) -> Callable[[float], int]:
    """Maps a time to its column, the last column being now; negative for what lies before the first.

    >>> place_of = columns_at(100.5, 10)
    >>> place_of(100.2), place_of(99.9), place_of(105.0), place_of(80.0)
    (9, 8, 9, -1)
    """
    oldest = int(engine_now // SECONDS_PER_COLUMN) - columns + 1

    def place_of(mono: float) -> int:
        return max(-1, min(columns - 1, int(mono // SECONDS_PER_COLUMN) - oldest))

    return place_of


def _marks(scene: Scene, columns: int) -> Line:
    marks = [" "] * columns
    place_of = columns_at(scene.engine_now, columns)
    for event in scene.view.events:
        if event.kind is EventKind.KNOBS_CHANGED and (place := place_of(event.mono)) >= 0:
            marks[place] = "◆"
    return (("".join(marks), "knob"),)


def time_axis(columns: int) -> str:
    """Labels every 15 columns, counted back from now."""
    cells = ["─"] * columns
    for back in range(15, columns, 15):
        label = f"-{back}s"
        at = columns - 1 - back
        if at + len(label) < columns:
            cells[at : at + len(label)] = label
    if columns > 3:
        cells[-3:] = "now"
    return "".join(cells[:columns])
