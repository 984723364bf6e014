"""The plan of the screen: nothing overlaps, nothing hangs over, the alert strip is always there."""

from hypothesis import given
from hypothesis import strategies as st

from schedtop.tui.drawing import PANELS
from schedtop.tui.layout import Size, plan, size_class

FOCI = sorted(set(PANELS) - {"lifeline"})


@given(st.integers(1, 300), st.integers(1, 120), st.sampled_from(FOCI), st.booleans())
def test_panels_neither_overlap_nor_hang_over(width: int, height: int, focus: str, is_maximised: bool) -> None:
    seen: set[tuple[int, int]] = set()
    for place in plan(width, height, focus, is_maximised).values():
        assert place.x >= 0
        assert place.x + place.width <= width
        assert place.y + place.height <= height
        cells = {(x, y) for x in range(place.x, place.x + place.width) for y in range(place.y, place.y + place.height)}
        assert not cells & seen
        seen |= cells
    assert len(seen) == width * height, "no cell is left to nobody"


@given(st.integers(40, 300), st.integers(10, 120), st.sampled_from(FOCI), st.booleans())
def test_alerts_and_the_focused_panel_are_on_screen(width: int, height: int, focus: str, is_maximised: bool) -> None:
    places = plan(width, height, focus, is_maximised)
    assert places["alerts"].y == 1
    if size_class(width, height) is Size.COMPACT or is_maximised:
        assert places[focus].height >= 3


def test_the_three_layouts_of_the_design() -> None:
    assert [size_class(*size) for size in ((80, 24), (120, 40), (200, 50), (39, 24))] == [
        Size.COMPACT, Size.MEDIUM, Size.LARGE, Size.TINY,
    ]  # fmt: skip
    assert {"budget", "kv", "requests", "latency", "knobs", "decisions", "advisor"} <= set(plan(120, 40))
    assert {"timeline", "lifeline"} <= set(plan(200, 50))
