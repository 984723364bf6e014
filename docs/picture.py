"""Makes the pictures of the screen in this folder, one per layout, from a recording of the real demo.

Run it with `.venv/bin/python docs/picture.py`; it takes about a minute. With the path of a recording made by
`schedtop record --kv-cells 600` it uses that one.
"""

import asyncio
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from schedtop.cli.demo import DEFAULT_KV_BLOCKS, engine_options, load_in_background
from schedtop.control.demo_engine import DemoEngine
from schedtop.control.messages import Envelope
from schedtop.engine.snapshot import Viewport
from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.replay import NoLink, ReplayApp
from schedtop.tui.state import EngineView
from schedtop.tui.tape import Tape, cut_to

FOLDER = Path(__file__).parent
LAYOUTS = {"screen-80x24.svg": (80, 24), "screen.svg": (120, 40), "screen-200x50.svg": (200, 50)}
REPLAY = "screen-replay.svg"
RECORDED = ("--for", "45s", "--kv-cells", "600", "--interval", "250ms")


def main() -> None:
    """Record the demo unless there is a recording, and save what a screen showed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else record(Path(folder) / "demo.rec")
        tape = Tape(path)
        place = worth_seeing(tape)
        for name, size in LAYOUTS.items():
            save(name, asyncio.run(look(Still(tape, place), size)))
        save(REPLAY, asyncio.run(look(ReplayApp(tape, Options()), (120, 40), place)))


def record(path: Path) -> Path:
    """Some time of the demo under its load."""
    options = engine_options("smollm2", DEFAULT_KV_BLOCKS, None)
    with DemoEngine(*options, port=0) as engine, load_in_background(str(engine.socket)):
        command = [sys.executable, "-m", "schedtop", "record", str(path), "--connect", str(engine.socket), *RECORDED]
        subprocess.run(command, check=True)
    return path


def worth_seeing(tape: Tape) -> int:
    """The last frame in which somebody waits and somebody was preempted."""
    for place in range(len(tape.frames) - 1, 0, -1):
        snapshot = tape.view_at(place).snapshot
        if snapshot is not None and snapshot.num_waiting > 1 and snapshot.counters.preemptions:
            return place
    sys.exit("no queue and no preemption in this recording")


class Still(SchedtopApp):
    """The live screen as it was at one frame of a recording."""

    def __init__(self, tape: Tape, place: int) -> None:
        wall = tape.frames[place].wall
        super().__init__([NoLink(tape.target)], replace(Options(), clock=lambda: wall))
        self._whole = _with_hands(tape.view_at(place))

    def want(self, viewport: Viewport) -> None:
        """What the engine would have sent."""
        self.views[self.current] = cut_to(self._whole, viewport)


def _with_hands(view: EngineView) -> EngineView:
    """Able to act, as the live screen was: a tape takes the commands away."""
    assert view.welcome is not None
    commands = msgspec.json.schema(Envelope)["$defs"]
    welcome = msgspec.structs.replace(view.welcome, capabilities=list(commands), read_only=False)
    return replace(view, welcome=welcome)


async def look(app: SchedtopApp, size: tuple[int, int], place: int | None = None) -> str:
    """The screen as SVG."""
    async with app.run_test(size=size) as pilot:
        if isinstance(app, ReplayApp) and place is not None:
            app.show_frame(place)
        for _ in range(3):  # the first painting tells what is wanted, the next ones show it
            app.paint()
            await pilot.pause()
        return app.export_screenshot(title="schedtop")


def save(name: str, svg: str) -> None:
    """Write a picture that fetches nothing: fonts of the reader's own machine."""
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    path = FOLDER / name
    path.write_text(svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), encoding="utf-8")
    print(f"{path}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
