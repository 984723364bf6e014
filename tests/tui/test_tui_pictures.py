"""Pictures of the screen: each layout, theme and state as SVG, compared with the one that a person has looked at.

After a wanted change: `pytest tests/tui/test_tui_pictures.py --snapshot-update`, then look at the new pictures.
"""

import time

import pytest

from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.replay import ReplayApp
from schedtop.tui.tape import Tape

THEMES = ["dark", "light", "high-contrast", "colour-blind", "mono"]


@pytest.fixture
def picture(snap_compare):
    """Compare the screen on `link` after `keys` with its stored picture."""

    def compared(link, size, keys=(), theme="dark", before=None, links=(), **options) -> bool:
        app = SchedtopApp(
            [link, *links],
            Options(clock=link.clock, tick_s=None, theme=theme, has_colour=theme != "mono", **options),
        )

        async def run(pilot) -> None:
            for step in range(6):
                if step and link.core.has_work:
                    link.play(8)
                link.publish()
                await pilot.pause()
            if before is not None:
                before(app)
                await pilot.pause()
            for key in keys:
                await pilot.press(key)
                link.publish()
                await pilot.pause()

        return snap_compare(app, terminal_size=size, run_before=run)

    return compared


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_picture_of_a_busy_engine(picture, busy_link, size) -> None:
    assert picture(busy_link, size)


@pytest.mark.parametrize("theme", THEMES)
def test_picture_of_each_theme_with_a_staged_knob(picture, busy_link, theme) -> None:
    assert picture(busy_link, (120, 40), keys=["5", "j", "minus"], theme=theme)


def test_picture_of_an_idle_engine(picture, engine_link) -> None:
    assert picture(engine_link, (80, 24))


def test_picture_of_a_lost_engine(picture, busy_link) -> None:
    def lose(app) -> None:
        busy_link.publish = lambda: None
        busy_link.lose("no engine answers on /run/demo.sock")
        busy_link.clock.advance(12.3)
        app.paint()

    assert picture(busy_link, (80, 24), before=lose)


def test_picture_of_stale_data(picture, busy_link) -> None:
    def age(app) -> None:
        busy_link.clock.advance(3.2)
        app.paint()

    assert picture(busy_link, (80, 24), before=age)


def test_picture_of_a_stalled_engine(picture, busy_link) -> None:
    def stall(app) -> None:
        busy_link.clock.advance(7.0)
        busy_link.publish()

    assert picture(busy_link, (80, 24), before=stall)


def test_picture_of_a_read_only_screen(picture, busy_link) -> None:
    assert picture(busy_link, (80, 24), keys=["x"], read_only=True)


def test_picture_without_box_drawing(picture, busy_link) -> None:
    assert picture(busy_link, (120, 40), is_ascii=True)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("help", ["question_mark"]),
        ("details", ["j", "j", "enter"]),
        ("confirm", ["space", "space", "x"]),
        ("commands", ["colon", "p", "a"]),
        ("acknowledged", ["5", "j", "minus", "enter"]),
        ("refused", ["5", "j", "9", "9", "enter", "enter"]),
        ("log", ["6"]),
        ("time axis", ["8"]),
        ("slider", ["5", "j", "left", "left"]),
        ("typing", ["5", "6", "4"]),
    ],
)
def test_picture_of_a_dialog_or_panel(picture, busy_link, name, keys) -> None:
    assert picture(busy_link, (80, 24), keys=keys)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_picture_of_a_preemption_storm(picture, new_link, send, size) -> None:
    link = new_link(num_kv_blocks=81, max_num_seqs=16, max_num_batched_tokens=2048)
    for number in range(16):
        send(link, f"chat-{number:02d}", 64, 600)
    link.play(400)
    link.forget()
    assert picture(link, size, keys=["6"])


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_picture_of_a_replay(snap_compare, recording, monkeypatch, size) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    async def run(pilot) -> None:
        for key in ("right_square_bracket", "right_square_bracket", "right_square_bracket"):
            await pilot.press(key)
            await pilot.pause()

    try:
        app = ReplayApp(Tape(recording), Options(tick_s=None))
        assert snap_compare(app, terminal_size=size, run_before=run)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_picture_of_a_fleet(picture, busy_link, new_link) -> None:
    other = new_link(name="second")
    assert picture(busy_link, (120, 40), links=[other])


def test_picture_of_a_screen_that_is_too_small(picture, busy_link) -> None:
    assert picture(busy_link, (20, 5))
