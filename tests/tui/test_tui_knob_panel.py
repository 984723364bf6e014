"""The knob panel: slider, typing, who changed what, the countdown of a change on trial, and news of others' changes."""

import pytest

from schedtop.control.messages import SetKnobs
from schedtop.engine.knobs import KnobSpec
from schedtop.tui import staging
from schedtop.tui.state import Ui

LAYOUTS = [(80, 24), (120, 40), (200, 50)]
sizes = pytest.mark.parametrize("size", LAYOUTS, ids=lambda size: f"{size[0]}x{size[1]}")


def slider_of(desk) -> str:
    return next(line for line in desk.panel("knobs").splitlines() if "├" in line)


def inner_corner(desk, name: str) -> tuple[int, int]:
    """Screen cell of the panel's own top left corner."""
    place = desk.app._main.board.plan[name]
    return place.x, place.y


@sizes
async def test_the_slider_shows_the_live_value_the_staged_one_and_both_ends(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        await desk.press("5", "j")
        assert slider_of(desk).count("◆") == 1
        assert "●" not in slider_of(desk)
        await desk.press("minus", "minus", "minus")
        line = slider_of(desk)
        assert line.index("●") < line.index("◆")
        assert line.strip("│ ").startswith("1 ├") and line.strip("│ ").endswith("┤ 16")


async def test_arrow_keys_move_the_slider_and_only_stage(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("left")
        assert desk.ui.staged == {}, "outside the knob panel arrows turn nothing"
        await desk.press("5", "left", "left")
        assert 0 < desk.ui.staged["max_num_batched_tokens"] < 512
        await desk.press("right", "right", "right")
        assert desk.ui.staged == {}, "back at the live value nothing is staged"
        assert not desk.sent(SetKnobs)


@sizes
async def test_a_click_on_the_slider_stages_the_value_under_it(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        await desk.press("5", "j")
        lines = desk.panel("knobs").splitlines()
        y = next(i for i, line in enumerate(lines) if "├" in line)
        x, top = inner_corner(desk, "knobs")
        await desk.pilot.click(offset=(x + lines[y].index("├") + 1, top + y))
        assert desk.ui.staged == {"max_num_seqs": 1}
        await desk.pilot.click(offset=(x + lines[y].index("┤") - 1, top + y))
        assert desk.ui.staged == {}, "the right end is the live value"
        assert not desk.sent(SetKnobs)


@sizes
async def test_a_click_chooses_the_knob_under_it(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        await desk.press("5")
        lines = desk.panel("knobs").splitlines()
        y = next(i for i, line in enumerate(lines) if "max_num_seqs" in line)
        x, top = inner_corner(desk, "knobs")
        await desk.pilot.click(offset=(x + 5, top + y))
        assert "› max_num_seqs" in desk.panel("knobs")


async def test_a_read_only_screens_slider_cannot_be_moved(at, busy_link) -> None:
    async with at(busy_link, read_only=True) as desk:
        await desk.press("5", "left", "right")
        desk.app._main.stage_share(0.0)
        assert desk.ui.staged == {}


@pytest.mark.parametrize(
    "spec",
    [
        KnobSpec(name="n", unit="", kind="int", summary="", low=1, high=8192, default=1),
        KnobSpec(name="n", unit="", kind="int", summary="", low=0, high=7, default=1),
        KnobSpec(name="n", unit="", kind="int", summary="", low=0, high=10_000_000_000, default=1),
        KnobSpec(name="n", unit="", kind="float", summary="", low=0.0, high=0.9, default=0.0),
    ],
    ids=lambda spec: f"{spec.low}-{spec.high}",
)
def test_each_place_of_a_slider_is_a_legal_value_and_the_value_lies_at_its_place(spec: KnobSpec) -> None:
    assert staging.value_at(spec, 0.0) == spec.low
    assert staging.value_at(spec, 1.0) == spec.high
    for place in range(101):
        value = staging.value_at(spec, place / 100)
        assert spec.low <= value <= spec.high
        assert staging.share_of(spec, staging.value_at(spec, staging.share_of(spec, value))) == pytest.approx(
            staging.share_of(spec, value), abs=0.01
        )


@pytest.mark.parametrize("direction", [1, -1])
def test_sliding_reaches_the_end_and_stays_there(direction: int) -> None:
    from schedtop.engine.config import EngineConfig
    from schedtop.engine.knobs import Knobs, knob_table

    table, live = knob_table(EngineConfig(num_kv_blocks=101)), Knobs()
    ui = Ui(knob=0)
    for _ in range(300):
        ui = staging.slid(ui, table, live, direction)
    spec = table[0]
    end = spec.high if direction > 0 else spec.low
    assert ui.staged.get(spec.name, getattr(live, spec.name)) == end


async def test_a_number_being_typed_says_what_enter_and_escape_do(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "6", "4")
        assert "512 → 64▏" in desk.panel("knobs")
        assert "typing a value: Enter stages it  Esc forgets it" in desk.panel("knobs")
        await desk.press("c")
        assert desk.ui.staged == {"max_num_batched_tokens": 64}, "c stages first, and applies the next time"
        assert not desk.sent(SetKnobs)


async def test_a_digit_on_a_knob_without_numbers_changes_no_panel_and_says_what_would_do(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("colon", *"policy=fcfs", "enter", "5", "3")
        assert desk.ui.focus == "knobs"
        assert "policy takes no number: + and - go through fcfs | priority" in desk.panel("action")
        await desk.press("escape", "3")
        assert desk.ui.focus == "requests"


async def test_a_change_by_somebody_else_is_told_with_its_author_and_stands_in_the_knobs_notes(at, busy_link) -> None:
    async with at(busy_link, (200, 50)) as desk:
        await desk.press("5", "j", "minus", "enter")
        assert "applied @ step" in desk.panel("action")
        busy_link.change_elsewhere({"max_num_seqs": 9}, client="autopilot", reason="protect ITL")
        await desk.news()
        await desk.news()
        shown = desk.panel("action")
        assert "applied" not in shown
        assert "max_num_seqs 15 → 9 (protect ITL) @ step" in shown and "by autopilot (uid 7)" in shown
        assert "range 1 to 16 requests · autopilot 0.0 s ago" in desk.panel("knobs")
        assert "max_num_seqs 15 → 9" in desk.panel("audit")


async def test_a_change_on_trial_counts_down_beside_its_receipt_and_its_end_replaces_the_receipt(at, busy_link) -> None:
    async with at(busy_link, (80, 24)) as desk:
        await desk.press("5", "j", "minus", "c")
        assert desk.panel("action").rstrip().endswith("undone in 60 s K keeps it")
        busy_link.clock.advance(61.0)
        busy_link.roll_back()
        await desk.news()
        await desk.news()
        shown = desk.panel("action")
        assert "applied" not in shown and "K keeps it" not in shown
        assert "max_num_seqs 15 → 16 (not confirmed within 60 s)" in shown


async def test_ones_own_change_is_no_news(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "j", "minus", "enter")
        busy_link.note("SetKnobs", "done", {"max_num_seqs": 16}, {"max_num_seqs": 15}, "tui")
        busy_link.audit[0]["change_id"] = 7  # the number in the receipt
        await desk.news()
        await desk.news()
        assert "applied @ step" in desk.panel("action")


def test_what_undo_may_stage_is_never_above_the_ceiling() -> None:
    spec = KnobSpec(name="n", unit="", kind="int", summary="", low=1, high=16, default=1)
    assert staging.value_at(spec, 9.0) == 16
    assert staging.value_at(spec, -1.0) == 1
