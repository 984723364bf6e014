"""Which requests the table shows: its two windows (running above, waiting below) and how the cursor moves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from schedtop.engine.snapshot import RequestRow, Snapshot, Viewport
from schedtop.tui.state import Ui

HEAD_ROWS = 1
SORT_FIELDS = (
    "", "request_id", "priority", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_blocks",
    "num_preemptions", "arrived",
)  # fmt: skip
"""Row fields in the order in which `<` and `>` walk them; empty is schedule order."""
_MARGIN = 32


@dataclass(frozen=True, slots=True)
class Windows:
    """Rows on screen. Offsets count from the first matching request of each kind."""

    running: Sequence[RequestRow | None]
    waiting: Sequence[RequestRow | None]
    running_offset: int
    waiting_offset: int
    has_divider: bool

    def lines(self) -> list[RequestRow | str | None]:
        """What each line under the header shows: a row, None for one not yet known, or "divider"."""
        return [*self.running, *(["divider"] if self.has_divider else []), *self.waiting]


def split(height: int, num_running: int, num_waiting: int) -> tuple[int, int]:
    """Rows for the running and the waiting; one line between them is the divider's when anybody waits.

    >>> split(10, 4, 0), split(10, 41, 12), split(10, 2, 40), split(10, 41, 2)
    ((10, 0), (5, 4), (2, 7), (7, 2))
    """
    if not num_waiting:
        return height, 0
    room = max(0, height - 1)
    running = min(num_running, max(room - num_waiting, (room + 1) // 2))
    return running, room - running


def windows(ui: Ui, snapshot: Snapshot, height: int) -> Windows:
    """The visible part of the table for `height` lines, the header not counted."""
    run_rows, wait_rows = split(height, snapshot.num_running_matched, snapshot.num_waiting_matched)
    run_offset = _clamped(ui.running_offset, run_rows, snapshot.num_running_matched)
    wait_offset = _clamped(ui.waiting_offset, wait_rows, snapshot.num_waiting_matched)
    return Windows(
        running=_slice(snapshot.running, 0, run_offset, run_rows, snapshot.num_running_matched),
        waiting=_slice(snapshot.waiting, ui.waiting_base, wait_offset, wait_rows, snapshot.num_waiting_matched),
        running_offset=run_offset,
        waiting_offset=wait_offset,
        has_divider=bool(snapshot.num_waiting_matched) and height > 0,
    )


def _clamped(offset: int, rows: int, total: int) -> int:
    return max(0, min(offset, total - rows))


def _slice(known: Sequence[RequestRow], base: int, offset: int, rows: int, total: int) -> list[RequestRow | None]:
    wanted = range(offset, min(offset + rows, total))
    return [known[i - base] if 0 <= i - base < len(known) else None for i in wanted]


def selected(ui: Ui, snapshot: Snapshot | None) -> RequestRow | None:
    """The row under the cursor; the first one when the chosen request is gone."""
    if snapshot is None:
        return None
    rows = [*snapshot.running, *snapshot.waiting]
    return next((row for row in rows if row.request_id == ui.cursor), rows[0] if rows else None)


def moved(ui: Ui, snapshot: Snapshot, delta: int, height: int) -> Ui:
    """`ui` with the cursor `delta` rows on, and scrolled so that the cursor is visible."""
    rows = [*snapshot.running, *snapshot.waiting]
    if not rows:
        return ui
    current = selected(ui, snapshot)
    index = next(i for i, row in enumerate(rows) if row is current)
    target = max(0, min(len(rows) - 1, index + delta))
    return _revealed(replace(ui, cursor=rows[target].request_id), snapshot, target, height)


def _revealed(ui: Ui, snapshot: Snapshot, index: int, height: int) -> Ui:
    run_rows, wait_rows = split(height, snapshot.num_running_matched, snapshot.num_waiting_matched)
    if index < len(snapshot.running):
        return replace(ui, running_offset=_scroll(ui.running_offset, index, run_rows))
    place = ui.waiting_base + index - len(snapshot.running)
    return replace(ui, waiting_offset=_scroll(ui.waiting_offset, place, wait_rows))


def _scroll(offset: int, index: int, rows: int) -> int:
    return min(index, max(offset, index - max(1, rows) + 1))


def scrolled(ui: Ui, snapshot: Snapshot, delta: int, height: int, is_waiting: bool) -> Ui:
    """`ui` with one of the two windows scrolled by `delta` rows (mouse wheel)."""
    run_rows, wait_rows = split(height, snapshot.num_running_matched, snapshot.num_waiting_matched)
    if is_waiting:
        offset = _clamped(ui.waiting_offset + delta, wait_rows, snapshot.num_waiting_matched)
        return replace(ui, waiting_offset=offset)
    return replace(ui, running_offset=_clamped(ui.running_offset + delta, run_rows, snapshot.num_running_matched))


def next_sort(ui: Ui, delta: int) -> Ui:
    """`ui` sorted by the next or the previous column."""
    place = (SORT_FIELDS.index(ui.sort) + delta) % len(SORT_FIELDS)
    return replace(ui, sort=SORT_FIELDS[place])


def viewport(ui: Ui, height: int, kv_cells: int, detail: str | None) -> Viewport:
    """What to subscribe to, so that the window and a margin around it are known."""
    base = max(0, ui.waiting_offset - _MARGIN)
    return Viewport(
        running_rows=max(64, ui.running_offset + height + _MARGIN),
        waiting_rows=max(64, height + 2 * _MARGIN),
        waiting_offset=base if base + _MARGIN > 64 else 0,
        id_contains=ui.filter,
        sort=ui.sort,
        descending=ui.is_descending,
        kv_cells=kv_cells,
        detail=detail,
    )
