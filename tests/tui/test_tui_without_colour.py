"""No state is told by hue alone: with all colours gone, and also without glyphs, the text still tells it."""

import itertools

import pytest

from schedtop.engine.snapshot import PoolUsage, RequestStatus
from schedtop.tui.alerts import Alert, Severity
from schedtop.tui.cells import ASCII, plain
from schedtop.tui.format import FILL, stacked
from schedtop.tui.state import Action, Outcome, Scene, Ui
from schedtop.tui.theme import shipped
from schedtop.tui.views import audit
from schedtop.tui.views.kv import GLYPHS, MARK
from schedtop.tui.views.lifeline import PHASES
from schedtop.tui.views.overview import action_line, kv_counts
from schedtop.tui.views.requests import STATUS

LAYOUTS = [(80, 24), (120, 40), (200, 50)]


def told_apart(texts: list[str], is_ascii: bool) -> None:
    shown = [text.translate(ASCII) if is_ascii else text for text in texts]
    assert len(set(shown)) == len(shown), shown


@pytest.mark.parametrize("is_ascii", [False, True])
def test_states_of_requests_and_blocks_phases_and_parts_of_the_budget_have_glyphs_or_words(is_ascii: bool) -> None:
    told_apart([text for text, _ in STATUS.values()], is_ascii)
    assert set(STATUS) == set(RequestStatus)
    told_apart([*(glyph for glyph, _ in GLYPHS.values()), MARK[0]], is_ascii)
    told_apart([glyph for _, glyph, _, _ in kv_counts(PoolUsage(usable=9, free=9, in_use=0))], is_ascii)
    told_apart(list(FILL.values()), is_ascii)
    told_apart([glyph for glyph, _ in PHASES.values()], is_ascii)
    told_apart([Alert(severity, "", "").glyph for severity in Severity], is_ascii)


@pytest.mark.parametrize("is_ascii", [False, True])
def test_in_the_plot_of_the_budget_prefill_decode_and_draft_are_drawn_differently(is_ascii: bool) -> None:
    for amount in (2.0, 4.0, 8.0):
        drawn = []
        for role in ("decode", "prefill", "draft"):
            rows = stacked([[amount]], [role], 1, 8.0)
            drawn.append("".join(text for text, _ in rows[0]))
        told_apart(drawn, is_ascii)


def test_outcomes_of_actions_and_audit_rows_have_glyphs_of_their_own(engine_link) -> None:
    from schedtop.tui.state import EngineView

    lines = [
        plain(action_line(Scene(EngineView("x"), Ui(action=Action("set", outcome, "words"))), 60))
        for outcome in Outcome
    ]
    told_apart(lines, is_ascii=False)
    told_apart(lines, is_ascii=True)
    rows = [audit.long_row({"outcome": outcome}) for outcome in ("done", "refused", "rolled back")]
    told_apart([plain(row) for row in rows], is_ascii=True)


@pytest.mark.parametrize("size", LAYOUTS, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_cursor_tag_staged_value_and_focus_show_in_mono(at, busy_link, size) -> None:
    async with at(busy_link, size, theme="mono", has_colour=False) as desk:
        plain_rows = desk.panel("requests").splitlines()
        assert "› " in plain_rows[2], "the row under the cursor"
        await desk.press("space")
        assert "◆ " in desk.panel("requests").splitlines()[2], "a tagged row"
        await desk.press("5", "minus")
        assert "512 → 480" in desk.panel("knobs")
        assert "1 staged" in desk.panel("knobs")


async def test_where_the_focus_is_shows_in_mono_by_attributes(at, busy_link) -> None:
    palette = shipped()["mono"]
    assert palette.style("title_focus") != palette.style("title")
    assert palette.style("cursor").reverse
    async with at(busy_link, theme="mono", has_colour=False) as desk:
        before = desk.app._main.board.panels["kv"]._shown[0]
        await desk.press("2")
        assert desk.app._main.board.panels["kv"]._shown[0] != before


@pytest.mark.parametrize("name", ["dark", "light", "high-contrast", "colour-blind", "mono"])
@pytest.mark.parametrize("size", LAYOUTS, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_theme_changes_colours_and_never_the_text(at, new_link, send, name, size) -> None:
    shown = []
    for theme in ("dark", name):
        link = new_link()
        for number in range(20):
            send(link, f"r{number}", 200, 300)
        link.play(60)
        async with at(link, size, theme=theme, has_colour=theme != "mono") as desk:
            assert desk.app.palette.name == theme
            shown.append({panel: desk.panel(panel) for panel in desk.app._main.board.plan})
    assert shown[0] == shown[1]


def seen(colour: tuple[int, int, int], kind: str) -> tuple[float, float, float]:
    """A colour as eyes without red or green cones see it (Viénot, Brettel and Mollon 1999, linear RGB)."""
    linear = [((part / 255 + 0.055) / 1.055) ** 2.4 if part > 10 else part / 255 / 12.92 for part in colour]
    red, green, blue = linear
    long = 17.8824 * red + 43.5161 * green + 4.11935 * blue
    medium = 3.45565 * red + 27.1554 * green + 3.86714 * blue
    short = 0.0299566 * red + 0.184309 * green + 1.46709 * blue
    if kind == "protan":
        long = 2.02344 * medium - 2.52581 * short
    else:
        medium = 0.494207 * long + 1.24827 * short
    return (
        0.080944 * long - 0.130504 * medium + 0.116721 * short,
        -0.0102485 * long + 0.0540194 * medium - 0.113615 * short,
        -0.000365294 * long - 0.00412163 * medium + 0.693513 * short,
    )


@pytest.mark.parametrize("kind", ["protan", "deutan"])
def test_colours_that_stand_side_by_side_differ_to_colour_blind_eyes(kind: str) -> None:
    palette = shipped()["colour-blind"]
    for group in (("good", "bad"), ("prefill", "decode", "draft"), ("running", "waiting", "preempted"),
                  ("kv_used", "kv_shared", "kv_free")):  # fmt: skip
        for one, other in itertools.combinations(group, 2):
            colours = [seen(palette.style(role).color.get_truecolor(), kind) for role in (one, other)]
            distance = sum((a - b) ** 2 for a, b in zip(*colours, strict=True)) ** 0.5
            assert distance > 0.08, (one, other, distance)
