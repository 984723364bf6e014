"""The screen under bad conditions: any size, garbage from users, a terminal that goes away."""

import fcntl
import json
import os
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import termios

import pytest
from rich.cells import cell_len

from schedtop.engine.sampling_params import SamplingParams
from schedtop.tui.drawing import PANELS
from schedtop.tui.keys import KEYS, keys_of
from schedtop.tui.layout import Size, size_class
from schedtop.tui.screens.main import MainScreen

GARBAGE = [
    "日本語のリクエスト名前",
    "👨‍👩‍👧‍👦-family",
    "e\u0301te\u0301",
    "\x1b[2J\x1b[31mred",
    "[bold]x[/bold] [link=a]",
    "tab\there\r\n",
    "\u202eevil\u2066",
    "a" * 200,
    "zero\u200bwidth",
    "ＦＵＬＬ",
]
SIZES = [(1, 1), (2, 2), (20, 5), (40, 10), (41, 11), (80, 24), (80, 60), (120, 40), (109, 33), (200, 50), (500, 200)]


def add_garbage(link) -> None:
    for name in GARBAGE:
        link.core.add_request(name, list(range(50)), SamplingParams(max_tokens=200, ignore_eos=True))
    link.play(5)


async def test_every_size_and_200_resizes_during_updates(make_app, busy_link) -> None:
    add_garbage(busy_link)
    app = make_app(busy_link)
    rng = random.Random(4)
    async with app.run_test(size=(80, 24)) as pilot:
        for step in range(200):
            size = SIZES[step] if step < len(SIZES) else (rng.randint(1, 220), rng.randint(1, 70))
            await pilot.resize_terminal(*size)
            if step % 3 == 0:
                busy_link.play(1)
                busy_link.publish()
            await pilot.pause()
            board = app._main.board
            assert set(board.plan) == ({"tiny"} if size_class(*size) is Size.TINY else set(board.plan) - {"tiny"})


async def test_dialogs_survive_any_size(make_app, busy_link) -> None:
    app = make_app(busy_link)
    async with app.run_test(size=(80, 24)) as pilot:
        for key in ("question_mark", "x", "colon", "f2", "enter", "A", "F"):
            await pilot.resize_terminal(80, 24)
            await pilot.press(key)
            for size in ((1, 1), (10, 3), (300, 80)):
                await pilot.resize_terminal(*size)
                await pilot.pause()
            await pilot.press("escape")
        assert len(app.screen_stack) == 2


@pytest.mark.parametrize(("size", "focus"), [((39, 9), "3"), ((80, 24), "5"), ((120, 40), "6"), ((200, 50), "3")])
async def test_every_key_of_the_table_in_every_layout(make_app, busy_link, size, focus) -> None:
    app = make_app(busy_link)
    app.save_picture = lambda: "saved nothing"
    async with app.run_test(size=size) as pilot:
        await pilot.press(focus)
        for key in KEYS:
            if key.id != "quit" and (names := keys_of(key, {})):
                await pilot.press(names[0])
                if not isinstance(app.screen, MainScreen) or key.id == "filter":
                    await pilot.press("escape")
        await pilot.pause()
        assert app.is_running
        assert len(app.screen_stack) == 2
        assert busy_link.core.snapshot(busy_link.viewport).num_running, "nothing was done that asks first"


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_garbage_in_names_leaves_every_line_at_the_width_of_its_panel(make_app, busy_link, size) -> None:
    busy_link.core.abort(busy_link.core.match(id_prefix=""))
    busy_link.core.take_outputs()
    add_garbage(busy_link)
    app = make_app(busy_link)
    async with app.run_test(size=size) as pilot:
        for key in ("3", "6", "8", "3"):
            await pilot.press(key)
            busy_link.publish()
            await pilot.pause()
            for name, place in app._main.board.plan.items():
                for line in app._main.board.panels[name].text().split("\n"):
                    assert cell_len(line) == place.width
                    assert line.isprintable()
        shown = app._main.board.panels["requests"].text()
        assert "[bold" in shown, "text from users is never markup"


async def test_columns_stay_aligned_beside_wide_characters(make_app, engine_link) -> None:
    for name in ("plain", "日本語", "👩‍👧", "e\u0301"):
        engine_link.core.add_request(name, [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
    engine_link.play(2)
    app = make_app(engine_link)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        lines = app._main.board.panels["requests"].text().split("\n")[2:6]
        assert len({cell_len(line[: line.index("▶")]) for line in lines}) == 1


@pytest.mark.parametrize("name", sorted(PANELS))
async def test_every_panel_draws_an_engine_that_has_told_nothing_yet(make_app, engine_link, name) -> None:
    engine_link.publish = lambda: None
    app = make_app(engine_link)
    async with app.run_test(size=(80, 24)) as pilot:
        app._main.action_panel(name)
        await pilot.pause()
        assert name in app._main.board.plan


# ---- a real process on a real terminal ---------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from schedtop.control.errors import Disconnected
from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.link import Refusal
from schedtop.tui.state import LinkDown

class Nowhere:
    target = "/nowhere.sock"
    async def run(self, post):
        post(LinkDown(self.target, "nobody there", 1.0))
        if "fail in worker" in sys.argv:
            raise ValueError("a bug of ours")
        await asyncio.Event().wait()
    async def request(self, command):
        return Refusal("disconnected", "no")

app = SchedtopApp([Nowhere()])
if "fail in paint" in sys.argv:
    def broken(*args):
        raise ValueError("a bug of ours")
    from schedtop.tui.screens import watching
    watching.draw = broken
app.run()
sys.exit(app.return_code or 0)
"""
ENTER_MODES = {b"\x1b[?1049h": b"\x1b[?1049l", b"\x1b[?1000h": b"\x1b[?1000l", b"\x1b[?25l": b"\x1b[?25h"}
"""Alternate screen, mouse, hidden cursor: what switches each on, and what must switch it off again."""


class Terminal:
    """A program on a pty of 80x24, and all that it wrote."""

    def __init__(self, *arguments: str) -> None:
        self.written = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", LANG="C.UTF-8")
            os.execv(sys.executable, [sys.executable, "-c", PROGRAM, *arguments])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def read_until(self, text: bytes) -> None:
        """Read until `text` was written or the program closed the terminal."""
        while text not in self.written:
            ready, _, _ = select.select([self.fd], [], [], 60)
            assert ready, "the program wrote nothing for a minute"
            try:
                chunk = os.read(self.fd, 65536)
            except OSError:
                return
            if not chunk:
                return
            self.written += chunk

    def status(self) -> int:
        """Wait for the end; the exit code, or minus the signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def assert_restored(self) -> None:
        """Every mode that was switched on is off at the end."""
        for on, off in ENTER_MODES.items():
            assert on in self.written
            assert self.written.rfind(off) > self.written.rfind(on)


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_signal_ends_it_with_the_terminal_restored(number: signal.Signals) -> None:
    terminal = Terminal()
    terminal.read_until(b"GONE")
    os.kill(terminal.pid, number)
    terminal.read_until(b"never written")
    assert terminal.status() == 128 + number
    terminal.assert_restored()


@pytest.mark.e2e
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-c"])
def test_leaving_by_a_key_restores_the_terminal(key: bytes) -> None:
    terminal = Terminal()
    terminal.read_until(b"GONE")
    os.write(terminal.fd, key)
    terminal.read_until(b"never written")
    assert terminal.status() == 0
    terminal.assert_restored()


@pytest.mark.e2e
def test_an_interrupt_from_elsewhere_restores_the_terminal() -> None:
    terminal = Terminal()
    terminal.read_until(b"GONE")
    os.kill(terminal.pid, signal.SIGINT)
    terminal.read_until(b"never written")
    terminal.status()
    terminal.assert_restored()


@pytest.mark.e2e
def test_a_closed_terminal_ends_it_without_spinning() -> None:
    terminal = Terminal()
    terminal.read_until(b"GONE")
    os.close(terminal.fd)
    assert terminal.status() != 0


@pytest.mark.e2e
def test_a_terminal_that_goes_without_a_signal_ends_it_too() -> None:
    main, screen = pty.openpty()
    fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    program = subprocess.Popen(  # a session of its own, without a controlling terminal: nobody sends it SIGHUP
        [sys.executable, "-c", PROGRAM], stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"},
    )  # fmt: skip
    os.close(screen)
    written = b""
    while b"GONE" not in written:
        written += os.read(main, 65536)
    os.close(main)
    assert program.wait(30) == 128 + signal.SIGHUP


@pytest.mark.e2e
@pytest.mark.parametrize("where", ["fail in worker", "fail in paint"])
def test_an_exception_restores_the_terminal_and_is_told(where: str) -> None:
    terminal = Terminal(where)
    terminal.read_until(b"a bug of ours")
    terminal.read_until(b"never written")
    assert terminal.status() == 1
    terminal.assert_restored()


@pytest.mark.e2e
def test_run_for_a_browser_it_draws_through_a_pipe_instead_of_printing_once() -> None:
    """As textual-serve runs it: no terminal anywhere, and a driver named in the environment."""
    code = "from schedtop.cli.watch import run_screen; run_screen(['/nowhere.sock'], False, None)"
    environment = {**os.environ, "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver", "TERM": "dumb"}
    pipe = subprocess.PIPE
    program = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    assert program.stdout is not None and program.stdin is not None
    with program:
        assert program.stdout.readline() == b"__GANGLION__\n"
        program.stdin.write(packet({"type": "resize", "width": 80, "height": 24}))
        program.stdin.flush()
        written = b""
        while b"schedtop" not in written:
            chunk = os.read(program.stdout.fileno(), 65536)
            assert chunk, "it ended before it drew"
            written += chunk
        program.terminate()
        program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM


def packet(meta: dict[str, object]) -> bytes:
    """A message to Textual's driver for browsers."""
    body = json.dumps(meta).encode()
    return b"M" + struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("driver", "term", "is_terminal", "expected"),
    [("", "xterm", True, True), ("", "dumb", True, False), ("", "xterm", False, False), ("web", "dumb", False, True)],
)
def test_where_there_is_a_screen_to_draw_on(monkeypatch, driver: str, term: str, is_terminal: bool, expected) -> None:
    from schedtop.cli.watch import has_screen

    monkeypatch.setenv("TEXTUAL_DRIVER", driver)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert has_screen() is expected
