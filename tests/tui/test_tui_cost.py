"""What a refresh costs: cells drawn, bytes for the terminal, modules loaded. Times are for the benchmarks."""

import gc
import subprocess
import sys

import pytest
from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate
from textual.strip import Strip

from schedtop.tui.widgets.output import Pen, narrowed


def refreshed(app) -> int:
    return sum(panel.num_cells_refreshed for panel in app._main.board.panels.values())


async def test_an_idle_engine_causes_no_refresh(make_app, engine_link) -> None:
    app = make_app(engine_link)
    async with app.run_test(size=(120, 40)) as pilot:
        for _ in range(3):
            engine_link.publish()
            await pilot.pause()
        before = refreshed(app)
        for _ in range(20):
            engine_link.publish()
            app._tick()
            await pilot.pause()
        assert refreshed(app) == before


async def test_a_step_refreshes_a_small_part_of_the_screen(make_app, busy_link) -> None:
    app = make_app(busy_link)
    async with app.run_test(size=(120, 40)) as pilot:
        for _ in range(3):
            busy_link.publish()
            await pilot.pause()
        before = refreshed(app)
        for _ in range(10):
            busy_link.play(2)
            busy_link.publish()
            await pilot.pause()
        assert refreshed(app) - before < 10 * 0.35 * 120 * 40


async def test_news_that_come_in_a_burst_are_painted_once(make_app, busy_link) -> None:
    app = make_app(busy_link)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        painted = []
        original = app._main.repaint
        app._main.repaint = lambda: (painted.append(1), original())
        for _ in range(50):
            busy_link.publish()
        await pilot.pause()
        assert len(painted) <= 2


async def test_rows_off_screen_are_never_drawn(make_app, new_link, send) -> None:
    link = new_link()
    for i in range(2000):
        send(link, f"r{i:04d}", 16, 8)
    app = make_app(link)
    async with app.run_test(size=(80, 24)) as pilot:
        link.play(1)
        link.publish()
        await pilot.pause()
        assert len(app.view.snapshot.waiting) < 200
        assert len(app._main.board.panels["requests"]._shown) == app._main.board.plan["requests"].height


def test_the_pen_writes_only_what_changes() -> None:
    pen = Pen(ColorSystem.TRUECOLOR)
    on_black = Style.parse("#ffffff on #000000")
    pen.write([Segment("a", on_black), Segment("b", on_black), Segment("c", Style.parse("#ff0000 on #000000"))])
    pen.write([Segment("d", Style.parse("bold #ff0000 on #000000")), Segment("e", Style.parse("#ff0000 on #000000"))])
    written = pen.lifted().replace("\x1b", "<")
    assert written == (
        "<[0m<[38;2;255;255;255;48;2;0;0;0mab<[38;2;255;0;0mc<[0;1;38;2;255;0;0;48;2;0;0;0md"
        "<[0;38;2;255;0;0;48;2;0;0;0me<[0m"
    )


def test_the_screen_runs_without_the_private_classes_that_make_it_write_less() -> None:
    code = """
import asyncio, textual.app, textual.screen, textual._compositor as compositor
kept = compositor.ChopsUpdate
del compositor.ChopsUpdate
from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.widgets import output
compositor.ChopsUpdate = kept
from schedtop.tui.link import ClientLink
async def run():
    app = SchedtopApp([ClientLink("/nowhere.sock")], Options(tick_s=None))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        return app._main.board.panels["identity"].text()
print(hasattr(output, "NarrowUpdate"), asyncio.run(run()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("False schedtop")


def test_an_update_of_another_shape_is_written_in_textuals_own_way() -> None:
    class Other(ChopsUpdate):
        def __init__(self) -> None:
            self.spans = [(0, 1)]

        def render_segments(self, console) -> str:
            return "its own"

    narrow = narrowed(Other())
    assert narrow is not None
    assert narrow.render_segments(Console()) == "its own"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("schedtop.tui.app", ["torch", "numpy", "transformers", "aiohttp", "schedtop.engine.core", "schedtop.kernels"]),
        ("schedtop.tui.once", ["torch", "numpy", "textual", "aiohttp", "schedtop.engine.core"]),
        ("schedtop.cli.watch", ["torch", "textual", "aiohttp", "schedtop.tui.app"]),
    ],
)
def test_the_screen_loads_no_engine(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {forbidden!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_a_closed_dialog_leaves_no_drawn_lines_behind(at, busy_link) -> None:
    def num_strips() -> int:
        gc.collect()
        return sum(type(each) is Strip for each in gc.get_objects())

    async with at(busy_link) as desk:
        await desk.press("question_mark", "q")
        before = num_strips()
        for _ in range(5):
            await desk.press("question_mark", "q")
        assert num_strips() - before < desk.app.size.height, "one dialog's worth at most"
