"""The request table: running above a divider, waiting below in schedule order, each with what it does or waits for."""

from collections.abc import Callable
from dataclasses import dataclass

from schedtop.engine.snapshot import RequestRow, RequestStatus, Snapshot
from schedtop.tui.cells import Line, Span, cell_len, clean, cut, cut_id, fit, width_of
from schedtop.tui.format import UNKNOWN, age, count, duration, percent
from schedtop.tui.state import Scene
from schedtop.tui.table import HEAD_ROWS, selected, windows
from schedtop.tui.views.frame import Body
from schedtop.tui.views.overview import reasons, waits_for

STATUS = {
    RequestStatus.RUNNING: ("▶ run", "running"),
    RequestStatus.WAITING: ("◌ wait", "waiting"),
    RequestStatus.DEFERRED: ("◇ defer", "deferred"),
    RequestStatus.PREEMPTED: ("▼ preem", "preempted"),
}
"""Glyph and word, so that a state reads without colour."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; those with a larger `rank` go first when there is no room."""

    title: str
    width: int
    rank: int
    field: str
    cell: Callable[[RequestRow, float], Span]
    right: bool = True


def _doing(row: RequestRow, width: int) -> Span:
    if row.status is not RequestStatus.RUNNING:
        return waits_for(row, width), STATUS[row.status][1]
    if row.num_computed_tokens < row.num_prompt_tokens and row.first_token_at is None:
        done = percent(row.num_computed_tokens, row.num_prompt_tokens)
        return f"prefill {done}", "prefill"
    if row.num_computed_tokens + 1 < row.num_prompt_tokens + row.num_output_tokens:
        return f"recompute {percent(row.num_computed_tokens, row.num_prompt_tokens + row.num_output_tokens)}", "prefill"
    return f"decode {percent(row.num_output_tokens, row.max_tokens)}", "decode"


def _ttft(row: RequestRow, now: float) -> Span:
    if row.first_token_at is None:
        return UNKNOWN, "dim"
    return duration(row.first_token_at - row.arrived), "text"


def _gap(row: RequestRow, now: float) -> Span:
    if row.last_token_at is None:
        return UNKNOWN, "dim"
    return duration(max(0.0, now - row.last_token_at)), "text"


def _or_dash(number: int, role: str) -> Span:
    return (count(number), role) if number else (UNKNOWN, "dim")


COLUMNS = (
    Column("request", 12, 0, "request_id", lambda row, _: (clean(row.request_id), "strong"), right=False),
    Column("state", 7, 0, "", lambda row, _: STATUS[row.status], right=False),
    Column("prio", 4, 1, "priority", lambda row, _: (str(row.priority), "text")),
    Column("prompt", 6, 3, "num_prompt_tokens", lambda row, _: (count(row.num_prompt_tokens), "text")),
    Column("out", 5, 2, "num_output_tokens", lambda row, _: (count(row.num_output_tokens), "text")),
    Column("max", 5, 7, "", lambda row, _: (count(row.max_tokens), "dim")),
    Column("done", 5, 6, "num_computed_tokens", lambda row, _: (count(row.num_computed_tokens), "text")),
    Column("cached", 6, 10, "", lambda row, _: _or_dash(row.num_cached_tokens, "kv_cached")),
    Column("+tok", 4, 4, "", lambda row, _: _or_dash(row.num_scheduled_tokens, "strong")),
    Column("blk", 4, 4, "num_blocks", lambda row, _: _or_dash(row.num_blocks, "text")),
    Column("pre", 3, 5, "num_preemptions", lambda row, _: _or_dash(row.num_preemptions, "preempted")),
    Column("lost", 5, 9, "", lambda row, _: _or_dash(row.num_lost_tokens, "preempted")),
    Column("ttft", 7, 11, "", _ttft),
    Column("gap", 7, 12, "", _gap),
    Column("age", 6, 1, "arrived", lambda row, now: (age(now - row.arrived), "text")),
)
DOING, DOING_WIDTH = "doing / waits for", 22
_TAG_WIDTH = 2
_MAX_ID, _ID_STEP = 36, 6
_ENOUGH_ID = 18
"""Cells for which an id pushes less important columns out."""
_WIDE = 100
"""Room from which reasons are spelt out."""


def requests(scene: Scene, width: int, height: int) -> Body:
    """Header and the visible rows."""
    snapshot = scene.view.snapshot
    if snapshot is None:
        return Body([(("waiting for the first snapshot", "dim"),)])
    columns, id_width = chosen_columns(width, longest_id(snapshot))
    lines = [_header(scene, columns, id_width, width)]
    under_cursor, now = selected(scene.ui, snapshot), scene.engine_now
    for item in windows(scene.ui, snapshot, height - HEAD_ROWS).lines():
        if item == "divider":
            lines.append(_divider(snapshot, width))
        elif isinstance(item, RequestRow):
            line = _row(scene, item, now, columns, id_width, width)
            lines.append(_under_cursor(scene, line) if item is under_cursor else line)
        else:
            lines.append(fit([("  …", "dim")], width))
    if len(lines) == HEAD_ROWS:
        lines.append((("  " + _nothing(scene), "dim"),))
    return Body(lines, _title(scene, snapshot))


def longest_id(snapshot: Snapshot) -> int:
    """Cells that the ids at hand take, in steps, so that columns don't move with each request that comes or goes."""
    longest = max((cell_len(clean(row.request_id)) for row in (*snapshot.running, *snapshot.waiting)), default=0)
    return min(_MAX_ID, -(-longest // _ID_STEP) * _ID_STEP)


def chosen_columns(width: int, id_width: int = 0) -> tuple[list[Column], int]:
    """The columns that fit, and the width of the id column: as wide as ids want once the rest has its room."""
    kept, least = list(COLUMNS), max(COLUMNS[0].width, min(id_width, _ENOUGH_ID))
    while len(kept) > 2 and _needed(kept, least) > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    spare = max(0, width - _needed(kept, COLUMNS[0].width))
    return kept, max(COLUMNS[0].width, min(id_width, COLUMNS[0].width + spare))


def _needed(columns: list[Column], id_width: int) -> int:
    rest = sum(column.width + 1 for column in columns if column is not COLUMNS[0])
    return _TAG_WIDTH + id_width + 1 + rest + DOING_WIDTH


def column_at(x: int, width: int, id_width: int) -> Column | None:
    """The column whose title lies under cell `x`; None on the tags and on what a request does."""
    columns, id_width = chosen_columns(width, id_width)
    edge = _TAG_WIDTH
    for column in columns:
        edge += (id_width if column is COLUMNS[0] else column.width) + 1
        if _TAG_WIDTH <= x < edge:
            return column
    return None


def _header(scene: Scene, columns: list[Column], id_width: int, width: int) -> Line:
    spans: list[Span] = [(" " * _TAG_WIDTH, "header")]
    for column in columns:
        size = id_width if column is COLUMNS[0] else column.width
        is_sorted = bool(scene.ui.sort) and column.field == scene.ui.sort
        marker = "▼" if scene.ui.is_descending else "▲"
        title = column.title[: size - 1] + marker if is_sorted else column.title
        spans.append((cut(title, size, column.right) + " ", "sorted" if is_sorted else "header"))
    return fit([*spans, (DOING, "header")], width, "header")


def _row(scene: Scene, row: RequestRow, now: float, columns: list[Column], id_width: int, width: int) -> Line:
    spans: list[Span] = [("◆ ", "tag") if row.request_id in scene.ui.tags else ("  ", "text")]
    for column in columns:
        size = id_width if column is COLUMNS[0] else column.width
        text, role = column.cell(row, now)
        fitted = cut_id(text, size) if column is COLUMNS[0] else cut(text, size, column.right)
        spans.append((fitted, role))
        spans.append((" ", "text"))
    return fit([*spans, _doing(row, width - width_of(spans))], width)


def _under_cursor(scene: Scene, line: Line) -> Line:
    marked = line if line[0][0].strip() else (("› ", "tag"), *line[1:])
    return tuple((text, role + "+cursor" if scene.ui.focus == "requests" else role) for text, role in marked)


def _divider(snapshot: Snapshot, width: int) -> Line:
    words: list[Span] = [
        ("── ", "border"),
        (f"waiting {count(snapshot.num_waiting)}", "waiting"),
        *reasons(snapshot, is_short=width < _WIDE),
        (" ", "border"),
    ]
    used = width_of(words)
    return fit([*words, ("─" * max(0, width - used), "border")], width)


def _nothing(scene: Scene) -> str:
    if scene.ui.filter:
        return f"no request matches the filter {clean(scene.ui.filter)!r}; Esc clears it"
    return "idle: no request is running or waiting"


def _title(scene: Scene, snapshot: Snapshot) -> Line:
    parts: list[Span] = [
        (f"{snapshot.num_running} running", "running"),
        (f" · {count(snapshot.num_waiting)} waiting", "waiting"),
    ]
    if scene.ui.filter:
        matched = snapshot.num_running_matched + snapshot.num_waiting_matched
        parts.append((f" · filter {clean(scene.ui.filter)!r}: {matched}", "warn"))
    if scene.ui.tags:
        parts.append((f" · {len(scene.ui.tags)} tagged", "tag"))
    return tuple(parts)
