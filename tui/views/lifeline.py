"""One request's life on a time axis: queued, prefill, decode, preempted, with the facts beside it. Pure."""

from dataclasses import dataclass

from schedtop.engine.snapshot import EngineCoreEvent, EventKind, RequestDetail, RequestRow, RequestStatus
from schedtop.tui.cells import Line, Span, clean, fit, width_of, wrap
from schedtop.tui.format import FILL, UNKNOWN, age, bar, count, duration
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body
from schedtop.tui.views.overview import waits_for, whom
from schedtop.tui.views.requests import STATUS

PHASES = {
    "queued": ("·", "waiting"),
    "prefill": (FILL["prefill"], "prefill"),
    "decode": (FILL["decode"], "decode"),
    "running again": ("▒", "decode"),
    "preempted": ("x", "preempted"),
}


TEXT_LINES = 3
"""Lines of generated text shown: the newest."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a request's life, in seconds."""

    phase: str
    start: float
    end: float


def stretches(detail: RequestDetail, now: float) -> list[Stretch]:
    """The request's life from its arrival to `now`, without gaps."""
    marks: list[tuple[float, str]] = [(detail.row.arrived, "queued")]
    for event in detail.events:
        phase = _phase_after(event)
        if phase:
            marks.append((event.mono, phase))
    if detail.row.first_token_at is not None:
        marks.append((detail.row.first_token_at, "decode"))
    marks.sort(key=lambda mark: mark[0])
    ends = [start for start, _ in marks[1:]] + [max(now, marks[-1][0])]
    return [Stretch(phase, start, end) for (start, phase), end in zip(marks, ends, strict=True)]


def _phase_after(event: EngineCoreEvent) -> str:
    match event.kind:
        case EventKind.QUEUED:
            return "queued"
        case EventKind.SCHEDULED:
            return "prefill"
        case EventKind.RESUMED:
            return "running again"
        case EventKind.PREEMPTED:
            return "preempted"
    return ""


def lifeline(scene: Scene, width: int, height: int) -> Body:
    """The lifeline of the request whose detail the snapshot carries."""
    snapshot = scene.view.snapshot
    if snapshot is None or snapshot.detail is None:
        has_requests = snapshot is not None and bool(snapshot.running or snapshot.waiting)
        return Body([(("asking the engine …" if has_requests else "no request to draw", "dim"),)])
    detail = snapshot.detail
    row = detail.row
    life = stretches(detail, scene.engine_now)
    lines: list[Line] = [*_facts(row, scene.engine_now, width), _bar(life, width), *_spent(life, width)]
    lines += _text(scene, width)
    lines += _events(detail, scene)
    glyph, role = STATUS[row.status]
    title: list[Span] = [(clean(detail.request_id), "strong"), (f" {glyph}", role)]
    return Body([fit(line, width) for line in lines], tuple(title))


def _bar(life: list[Stretch], width: int) -> Line:
    parts = [(stretch.end - stretch.start, *PHASES[stretch.phase]) for stretch in life]
    return tuple(bar(parts, width))


def _spent(life: list[Stretch], width: int) -> list[Line]:
    """How long each phase lasted in all, in as many lines as that takes."""
    lines: list[list[Span]] = [[]]
    for phase, (glyph, role) in PHASES.items():
        total = sum(stretch.end - stretch.start for stretch in life if stretch.phase == phase)
        part: list[Span] = [(glyph, role), (f" {phase} ", "dim"), (f"{duration(total)}   ", "text")]
        if total > 0:
            if lines[-1] and width_of([*lines[-1], *part]) > width + 3:
                lines.append([])
            lines[-1] += part
    return [tuple(line) for line in lines]


def _facts(row: RequestRow, now: float, width: int) -> list[Line]:
    words = [
        f"priority {row.priority}",
        f"prompt {count(row.num_prompt_tokens)}",
        f"out {count(row.num_output_tokens)}/{count(row.max_tokens)}",
        f"computed {count(row.num_computed_tokens)}",
        f"{count(row.num_blocks)} blocks",
        f"age {age(now - row.arrived)}",
        f"ttft {duration(row.first_token_at - row.arrived) if row.first_token_at is not None else UNKNOWN}",
    ]
    if row.num_preemptions:
        words.append(f"preempted {row.num_preemptions}x, lost {count(row.num_lost_tokens)} tokens")
    lines: list[Line] = [((line, "text"),) for line in wrap(" · ".join(words), width)]
    if row.status is not RequestStatus.RUNNING:
        lines.insert(0, ((f"waits for {waits_for(row)}", STATUS[row.status][1]),))
    return lines


def _text(scene: Scene, width: int) -> list[Line]:
    """The last lines of what it has generated."""
    return [(("│ ", "dim"), (line, "strong")) for line in wrap(clean(scene.text), width - 2)[-TEXT_LINES:]]


def _events(detail: RequestDetail, scene: Scene) -> list[Line]:
    return [event_line(event, scene.engine_now) for event in reversed(detail.events)]


def event_line(event: EngineCoreEvent, now: float) -> Line:
    """One event: when, what, and for a preemption for whom and at what cost."""
    role = "preempted" if event.kind is EventKind.PREEMPTED else "knob" if event.changes else "text"
    words = clean(event.detail)
    if event.preemption is not None:
        words = f"for {whom(event.preemption)}, {count(event.preemption.num_lost_tokens)} tokens lost"
    return (
        (f"{age(max(0.0, now - event.mono)):>6} ago ", "dim"),
        (f"step {event.step:<7}", "dim"),
        (f"{event.kind.value:<10} ", role),
        (words, "text"),
    )
