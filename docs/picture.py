"""Makes `docs/screen.svg`, the README's picture: the real screen on the real demo, with a queue and a preemption.

Run it with `.venv/bin/python docs/picture.py`; it takes about a minute.
"""

import asyncio
import re
import sys
import time
from pathlib import Path

from schedtop.cli.demo import DEFAULT_KV_BLOCKS, engine_options, load_in_background
from schedtop.control.demo_engine import DemoEngine
from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.link import ClientLink

SIZE = (120, 40)
LIMIT_S = 90.0
"""After that something is wrong with the demo."""
WARM_S = 20.0
"""Time for curves and latencies to fill."""


def main() -> None:
    """Start the demo, look at it, save what is seen."""
    target = Path(__file__).with_name("screen.svg")
    options = engine_options("smollm2", DEFAULT_KV_BLOCKS, None)
    with DemoEngine(*options, port=0) as engine, load_in_background(str(engine.socket)):
        svg = asyncio.run(look(str(engine.socket)))
    target.write_text(without_web_fonts(svg), encoding="utf-8")
    print(f"{target}: {target.stat().st_size // 1024} KiB")


async def look(address: str) -> str:
    """The screen as SVG, at a moment worth seeing."""
    app = SchedtopApp([ClientLink(address, False)], Options())
    async with app.run_test(size=SIZE) as pilot:
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < LIMIT_S:
            await pilot.pause(0.25)
            if elapsed > WARM_S and is_worth_seeing(app):
                return app.export_screenshot(title="schedtop")
    sys.exit(f"no queue and no preemption within {LIMIT_S:g} s")


def is_worth_seeing(app: SchedtopApp) -> bool:
    """Somebody waits, and somebody was preempted."""
    snapshot = app.view.snapshot
    return snapshot is not None and snapshot.num_waiting > 0 and snapshot.counters.preemptions > 0


def without_web_fonts(svg: str) -> str:
    """Fonts of the reader's own machine: a picture should fetch nothing."""
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")


if __name__ == "__main__":
    main()
