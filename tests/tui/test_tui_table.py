"""Which rows the request table shows, and how the cursor moves, with 10,000 waiting."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from schedtop.engine.snapshot import RequestRow, RequestStatus, Snapshot, Viewport
from schedtop.tui import table
from schedtop.tui.state import Ui


def row(name: str, status: RequestStatus = RequestStatus.RUNNING) -> RequestRow:
    return RequestRow(
        request_id=name, status=status, priority=0, arrived=0.0, num_prompt_tokens=1, num_output_tokens=0,
        max_tokens=1, num_computed_tokens=0,
    )  # fmt: skip


def snapshot_of(engine_link, num_running: int, num_waiting: int, base: int = 0, held: int = 64) -> Snapshot:
    """A snapshot as the server would cut it: a window of the waiting."""
    import msgspec

    running = [row(f"run-{i}") for i in range(num_running)]
    window = range(base, min(base + held, num_waiting))
    waiting = [row(f"wait-{i}", RequestStatus.WAITING) for i in window]
    return msgspec.structs.replace(
        engine_link.core.snapshot(Viewport()), running=running, waiting=waiting, num_running_matched=num_running,
        num_waiting_matched=num_waiting, num_running=num_running, num_waiting=num_waiting,
    )  # fmt: skip


@given(st.integers(0, 60), st.integers(0, 100), st.integers(0, 10_000))
def test_both_kinds_are_always_in_sight_and_fill_the_height(height: int, num_running: int, num_waiting: int) -> None:
    running, waiting = table.split(height, num_running, num_waiting)
    assert running + waiting + (1 if num_waiting and height else 0) == height
    if height >= 4 and num_running and num_waiting:
        assert running >= 1
        assert waiting >= 1


def test_the_cursor_walks_from_the_running_into_the_waiting(engine_link) -> None:
    snapshot = snapshot_of(engine_link, 3, 2)
    ui = Ui()
    visited = []
    for _ in range(6):
        visited.append(table.selected(ui, snapshot).request_id)
        ui = table.moved(ui, snapshot, 1, 10)
    assert visited == ["run-0", "run-1", "run-2", "wait-0", "wait-1", "wait-1"]


def test_the_cursor_is_always_visible(engine_link) -> None:
    snapshot = snapshot_of(engine_link, 40, 40)
    ui = Ui()
    for _ in range(79):
        ui = table.moved(ui, snapshot, 1, 11)
        shown = [item.request_id for item in table.windows(ui, snapshot, 11).lines() if isinstance(item, RequestRow)]
        assert ui.cursor in shown


def test_rows_outside_the_delivered_window_are_drawn_as_not_yet_known(engine_link) -> None:
    snapshot = snapshot_of(engine_link, 0, 10_000)
    shown = table.windows(Ui(waiting_offset=5000), snapshot, 20)
    assert all(item is None for item in shown.waiting)


def test_scrolling_deep_asks_for_a_window_around_the_place(engine_link) -> None:
    wanted = table.viewport(Ui(waiting_offset=5000), 20, 0, None)
    assert wanted.waiting_offset <= 5000
    assert wanted.waiting_offset + wanted.waiting_rows >= 5020
    snapshot = snapshot_of(engine_link, 0, 10_000, base=wanted.waiting_offset, held=wanted.waiting_rows)
    shown = table.windows(Ui(waiting_offset=5000, waiting_base=wanted.waiting_offset), snapshot, 20)
    assert [item.request_id for item in shown.waiting][:2] == ["wait-5000", "wait-5001"]


def test_the_cursor_goes_to_the_first_row_when_its_request_is_gone(engine_link) -> None:
    assert table.selected(Ui(cursor="gone"), snapshot_of(engine_link, 2, 0)).request_id == "run-0"
    assert table.selected(Ui(), None) is None


def test_sorting_walks_all_columns_and_comes_back() -> None:
    ui, walked = Ui(), []
    for _ in table.SORT_FIELDS:
        ui = table.next_sort(ui, 1)
        walked.append(ui.sort)
    assert ui.sort == ""
    assert sorted(walked) == sorted(table.SORT_FIELDS)
    assert table.next_sort(replace(ui), -1).sort == table.SORT_FIELDS[-1]


def test_every_sort_field_is_a_field_of_a_row() -> None:
    assert {field for field in table.SORT_FIELDS if field} <= set(RequestRow.__struct_fields__)
