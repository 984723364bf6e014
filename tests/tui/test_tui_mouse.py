"""Everything that a key does to what is seen, the mouse does too."""

import pytest

from schedtop.tui.keys import footer_key_at, in_footer
from schedtop.tui.screens.simple import HelpDialog
from schedtop.tui.views.requests import chosen_columns, column_at

LAYOUTS = [(80, 24), (120, 40), (200, 50)]
sizes = pytest.mark.parametrize("size", LAYOUTS, ids=lambda size: f"{size[0]}x{size[1]}")


@sizes
async def test_a_click_on_a_columns_title_sorts_by_it_and_the_next_one_inverts(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        place = desk.app._main.board.plan["requests"]
        head = desk.panel("requests").splitlines()[1]
        spot = (place.x + head.index("prio"), place.y + 1)
        await desk.pilot.click(offset=spot)
        await desk.news()
        assert (busy_link.viewport.sort, busy_link.viewport.descending) == ("priority", False)
        assert "▲" in desk.panel("requests").splitlines()[1]
        await desk.pilot.click(offset=spot)
        await desk.news()
        assert (busy_link.viewport.sort, busy_link.viewport.descending) == ("priority", True)


async def test_a_click_on_a_title_that_sorts_nothing_changes_nothing(at, busy_link) -> None:
    async with at(busy_link) as desk:
        place = desk.app._main.board.plan["requests"]
        head = desk.panel("requests").splitlines()[1]
        for word in ("state", "doing"):
            await desk.pilot.click(offset=(place.x + head.index(word), place.y + 1))
        assert desk.ui.sort == ""


@pytest.mark.parametrize("width", [60, 80, 140, 200])
def test_every_cell_of_a_title_belongs_to_its_column(width: int) -> None:
    columns, id_width = chosen_columns(width, 18)
    edge = 2
    for column in columns:
        size = id_width if column.field == "request_id" else column.width
        assert {column_at(x, width, 18) for x in range(edge, edge + size)} == {column}
        edge += size + 1
    assert column_at(edge, width, 18) is None
    assert column_at(0, width, 18) is None


async def test_a_click_on_a_key_of_the_footer_presses_it(at, busy_link) -> None:
    async with at(busy_link) as desk:
        y = desk.app._main.board.plan["keys"].y
        await desk.pilot.click(offset=(1, y))
        assert isinstance(desk.app.screen, HelpDialog)
        await desk.press("escape")
        await desk.pilot.click(offset=(desk.panel("keys").index("5 knobs"), y))
        await desk.pilot.pause()
        assert desk.ui.focus == "knobs"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_footer_knows_which_key_lies_where(width: int) -> None:
    edge = 0
    for key, name in in_footer(width, {}):
        assert footer_key_at(edge, width, {}) is key
        edge += len(name) + len(key.label) + 3
    assert edge <= width
    assert footer_key_at(edge, width, {}) is None


async def test_a_click_focuses_any_panel(at, busy_link) -> None:
    async with at(busy_link) as desk:
        for name in ("budget", "kv", "latency", "decisions", "advisor"):
            place = desk.app._main.board.plan[name]
            await desk.pilot.click(offset=(place.x + 3, place.y + 1))
            assert desk.ui.focus == name


async def test_a_double_click_opens_the_request(at, busy_link) -> None:
    from schedtop.tui.screens.live import DetailDialog

    async with at(busy_link) as desk:
        place = desk.app._main.board.plan["requests"]
        await desk.pilot.click(offset=(place.x + 6, place.y + 3), times=2)
        await desk.news()
        assert isinstance(desk.app.screen, DetailDialog)


async def test_the_wheel_moves_through_knobs_log_and_dialogs(at, busy_link) -> None:
    async with at(busy_link) as desk:
        panels = desk.app._main.board.panels
        panels["knobs"].post_message(panels["knobs"].Clicked(panels["knobs"], 3, 3, wheel=1))
        await desk.pilot.pause()
        assert (desk.ui.focus, desk.ui.knob) == ("knobs", 1)
        panels["decisions"].post_message(panels["decisions"].Clicked(panels["decisions"], 3, 3, wheel=1))
        await desk.pilot.pause()
        assert desk.ui.log_offset == 1
        await desk.press("question_mark")
        dialog = desk.app.screen
        dialog.panel.post_message(dialog.panel.Clicked(dialog.panel, 3, 3, wheel=1))
        await desk.pilot.pause()
        assert dialog.offset_line == 3
