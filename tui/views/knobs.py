"""The knob panel: live value, staged value, ceiling, and for the selected knob what it does. Pure.

A staged value is drawn as a wish beside the live one; only what the engine published is drawn as its value.
"""

from dataclasses import dataclass

from schedtop.engine.knobs import KnobSpec, KnobValue
from schedtop.engine.sim.outlook import Outlook, Range
from schedtop.engine.snapshot import EventKind
from schedtop.tui import staging
from schedtop.tui.cells import Line, Span, clean, cut, fit, wrap
from schedtop.tui.foresight import Prospect
from schedtop.tui.format import UNKNOWN, age, count, duration, value_text
from schedtop.tui.staging import problem, range_text
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body

_CEILING = 7
_ROOMY = 14
"""Lines of the panel from which a forecast doesn't take the place of the description."""


def knobs(scene: Scene, width: int, height: int) -> Body:
    """A window of the knob table around the selected one, and notes about that one."""
    specs, snapshot = scene.view.specs, scene.view.snapshot
    if not specs or snapshot is None:
        return Body([])
    notes = note_lines(scene, selected_spec(scene), width, is_short=height < _ROOMY)
    first, rows = window(scene, len(notes), height)
    lines: list[Line] = []
    for place in range(first, min(first + rows, len(specs))):
        line = _row(scene, specs[place], getattr(snapshot.knobs, specs[place].name, None), width)
        is_selected = place == scene.ui.knob % len(specs)
        if is_selected and scene.ui.focus == "knobs":
            line = tuple((text, role + "+cursor") for text, role in (("› ", "tag"), *line[1:]))
        lines.append(line)
    if rows < height:
        lines += [((" " * width, "text"),)] * (height - len(notes) - len(lines)) + notes
    return Body(lines, _title(scene, first, rows, len(specs)))


def selected_spec(scene: Scene) -> KnobSpec:
    """The knob under the cursor."""
    return scene.view.specs[scene.ui.knob % len(scene.view.specs)]


def window(scene: Scene, num_notes: int, height: int) -> tuple[int, int]:
    """The first knob shown and how many rows the table has."""
    total = len(scene.view.specs)
    rows = height - num_notes if height >= num_notes + 2 else height
    return first_shown(scene.ui.knob % total, total, rows), rows


@dataclass(frozen=True, slots=True)
class Hit:
    """What lies under a click: a knob of the table, or a place on the selected knob's slider (0 to 1)."""

    knob: int | None = None
    share: float | None = None


def hit(scene: Scene, width: int, height: int, x: int, y: int) -> Hit:
    """What of the panel lies under cell (x, y) of its inside."""
    if not scene.view.specs or scene.view.snapshot is None:
        return Hit()
    spec = selected_spec(scene)
    notes = note_lines(scene, spec, width, is_short=height < _ROOMY)
    first, rows = window(scene, len(notes), height)
    if y < rows:
        return Hit(knob=first + y) if first + y < len(scene.view.specs) else Hit()
    note = y - (height - len(notes))
    start, past = slider_ends(spec, width)
    if 0 <= note < len(notes) and staging.can_slide(spec) and notes[note] == _slider(scene, spec, width):
        return Hit(share=(x - start) / max(1, past - start - 1)) if start - 1 <= x <= past else Hit()
    return Hit()


def first_shown(selected: int, total: int, rows: int) -> int:
    """The first knob of the window that keeps the selected one in sight.

    >>> first_shown(0, 20, 8), first_shown(10, 20, 8), first_shown(19, 20, 8)
    (0, 6, 12)
    """
    return max(0, min(selected - rows // 2, total - rows))


def _row(scene: Scene, spec: KnobSpec, live: KnobValue | None, width: int) -> Line:
    right = _ceiling(spec)
    value = _value(scene, spec, live)
    value_width = max(12, sum(len(text) for text, _ in value))
    name_width = max(8, width - 2 - value_width - _CEILING - 1)
    staged = spec.name in scene.ui.staged
    is_default = live == spec.default or (spec.high is not None and live == spec.high)
    mark: Span = ("* ", "staged") if staged else ("  ", "text")
    name: Span = (middle(spec.name, name_width), "text" if is_default else "strong")
    padding: Span = (" " * (value_width - sum(len(text) for text, _ in value)), "text")
    return fit([mark, name, padding, *value, (cut(right, _CEILING + 1, right=True), "dim")], width)


def middle(text: str, width: int) -> str:
    """`text` in `width` cells; a long name loses its middle, so that two names never look the same.

    >>> middle("long_prefill_token_threshold_adaptive", 24), middle("victim", 8)
    ('long_prefill…ld_adaptive', 'victim  ')
    """
    if len(text) <= width:
        return text.ljust(width)
    end = (width - 1) // 2
    return text[: width - 1 - end] + "…" + text[len(text) - end :]


def _ceiling(spec: KnobSpec) -> str:
    if spec.kind in ("bool", "choice") or spec.high is None:
        return ""
    return f"≤{count(spec.high) if spec.high >= 1 else value_text(float(spec.high))}"


def _value(scene: Scene, spec: KnobSpec, live: KnobValue | None) -> list[Span]:
    is_selected = scene.view.specs[scene.ui.knob % len(scene.view.specs)] is spec
    old: Span = ("not exported" if live is None else value_text(live), "strong")
    if is_selected and scene.ui.entry:
        return [old, (" → ", "dim"), (scene.ui.entry + "▏", "staged")]
    if spec.name not in scene.ui.staged:
        return [old]
    new = scene.ui.staged[spec.name]
    return [old, (" → ", "dim"), (value_text(new), "bad" if problem(spec, new) else "staged")]


def note_lines(scene: Scene, spec: KnobSpec, width: int, is_short: bool = False) -> list[Line]:
    """What the selected knob does, its range, what is foreseen and what can be done.

    One line unless the panel has the focus; where it `is_short`, a forecast takes the place of the description.
    """
    if scene.ui.focus != "knobs" and not scene.ui.staged:
        return [fit(_hint(scene, spec), width)]
    foreseen = (
        prospect_lines(scene.ui.prospect, width, 1 if is_short else 3) if scene.ui.prospect and scene.ui.staged else []
    )
    words = [] if is_short and len(foreseen) > 1 else wrap(spec.summary, width)
    most = 1 if is_short and foreseen else 2
    if len(words) > most:
        words = [*words[: most - 1], cut(" ".join(words[most - 1 :]), width)]
    lines: list[Line] = [(("┄" * width, "border"),)]
    lines += [((line, "dim"),) for line in words]
    has_slider = staging.can_slide(spec)
    if not (is_short and len(foreseen) > 1 and has_slider):  # there, the slider tells the range
        lines.append(_range_line(scene, spec))
    lines += foreseen
    if has_slider:  # at the end, so that it stays under the mouse when a forecast comes in
        lines.append(_slider(scene, spec, width))
    lines.append(_hint(scene, spec))
    return [fit(line, width) for line in lines]


def slider_ends(spec: KnobSpec, width: int) -> tuple[int, int]:
    """First and past-last cell of the slider's track, between the two ends of the range."""
    low, high = _end_texts(spec)
    return len(low) + 2, max(len(low) + 6, width - len(high) - 2)


def _end_texts(spec: KnobSpec) -> tuple[str, str]:
    return value_text(float(spec.low or 0)), count(spec.high or 0) if (spec.high or 0) >= 1 else value_text(spec.high)


def _slider(scene: Scene, spec: KnobSpec, width: int) -> Line:
    """The range as a track: ◆ where the engine stands, ● where the staged value would put it."""
    low, high = _end_texts(spec)
    start, past = slider_ends(spec, width)
    marks: dict[int, Span] = {}
    live = getattr(scene.view.snapshot.knobs, spec.name, None) if scene.view.snapshot else None
    for value, mark in ((live, ("◆", "strong")), (scene.ui.staged.get(spec.name), ("●", "staged"))):
        if value is not None:
            marks[round(staging.share_of(spec, float(value)) * (past - start - 1))] = mark
    spans: list[Span] = [(f"{low} ", "dim"), ("├", "border")]
    edge = 0
    for place, mark in sorted(marks.items()):
        spans += [("─" * (place - edge), "border"), mark]
        edge = place + 1
    spans += [("─" * (past - start - edge), "border"), ("┤", "border"), (f" {high}", "dim")]
    return fit([span for span in spans if span[0]], width)


def prospect_lines(prospect: Prospect, width: int, num_notes: int = 1) -> list[Line]:
    """The forecast: a line per measure with its range, then what it rests on; or why there is none."""
    foreseen = prospect.forecast
    if foreseen is None:
        words = f"no forecast: {prospect.reason}" if prospect.reason else "no forecast yet: looking ahead …"
        return [((cut(clean(words), width), "dim"),)]
    lines = [_measure_line(name, foreseen.now, foreseen.then, width) for name in _MEASURES]
    basis = f"next {foreseen.horizon_s:g} s, {foreseen.num_draws} draws"
    notes = "".join(f" · {clean(warning)}" for warning in foreseen.warnings)
    broken = wrap(basis + notes, width)
    shown = [*broken[: num_notes - 1], " ".join(broken[num_notes - 1 :])]
    return [*lines, *(((cut(line, width), "warn" if notes else "dim"),) for line in shown if line)]


_MEASURES = {"TTFT p95": "ttft_p95_s", "ITL p99": "itl_p99_s", "preempted": "preemptions"}


def _measure_line(label: str, now: Outlook, then: Outlook, width: int) -> Line:
    before, after = (getattr(outlook, _MEASURES[label]) for outlook in (now, then))
    is_time = label != "preempted"
    role = "text"
    if before is not None and after is not None and not before.low <= after.mid <= before.high:
        role = "good" if after.mid < before.mid else "warn"
    return fit(
        [(f"{label:<9}", "dim"), (f"{_amount(before, is_time):>7}", "text"), (" → ", "dim"),
         (f"{_amount(after, is_time):>7}", role), (_spread(after, is_time), "dim")],
        width,
    )  # fmt: skip


def _amount(value: Range | None, is_time: bool) -> str:
    return UNKNOWN if value is None else duration(value.mid) if is_time else count(value.mid)


def _spread(value: Range | None, is_time: bool) -> str:
    if value is None or value.low == value.high:
        return ""
    low, high = (duration(end) if is_time else count(end) for end in (value.low, value.high))
    return f" ({low} to {high})"


def _range_line(scene: Scene, spec: KnobSpec) -> Line:
    changed = next(
        (e for e in reversed(scene.view.events) if e.kind is EventKind.KNOBS_CHANGED and spec.name in e.changes), None
    )
    row = next((row for row in scene.view.audit if spec.name in (row.get("after") or {})), None)
    by = clean(str(row.get("on_behalf_of") or row.get("client"))) if row else "changed"
    since = f"{by} {age(max(0.0, scene.engine_now - changed.mono))} ago" if changed else spec.effect
    return (("range ", "dim"), (range_text(spec), "text"), (f" · {since}", "dim"))


def _hint(scene: Scene, spec: KnobSpec) -> Line:
    ui = scene.ui
    if ui.is_read_only:
        return (("read-only", "warn"),)
    if ui.entry:
        return (("typing a value: ", "staged"), ("Enter", "key"), (" stages it  ", "dim"), ("Esc", "key"),
                (" forgets it", "dim"))  # fmt: skip
    if spec.name in ui.staged and (why := problem(spec, ui.staged[spec.name])):
        return ((f"✗ {why}", "bad"),)
    if ui.staged:
        return ((f"{len(ui.staged)} staged: ", "staged"), ("Enter", "key"), (" apply  ", "dim"), ("c", "key"),
                (" for 60 s  ", "dim"), ("Esc", "key"), (" drop", "dim"))  # fmt: skip
    if ui.focus != "knobs":
        return (("5", "key"), (" to turn knobs", "dim"))
    if spec.kind in ("bool", "choice"):
        return (("+ -", "key"), (" stage another  ", "dim"), ("Esc", "key"), (" leaves the knobs", "dim"))
    return (("+ -", "key"), (" stage, or type a number  ", "dim"), ("Esc", "key"), (" leaves", "dim"))


def _title(scene: Scene, first: int, rows: int, total: int) -> Line:
    generation = scene.view.snapshot.generation if scene.view.snapshot else 0
    spans: list[Span] = [(f"generation {generation}", "dim")]
    if rows < total:
        spans.append((f" · {first + 1}-{min(first + rows, total)} of {total}", "dim"))
    if scene.ui.staged:
        spans.append((f" · {len(scene.ui.staged)} staged", "staged"))
    return tuple(spans)
