"""The screen in a real terminal: it shows the engine, turns a knob that the engine acknowledges, and leaves cleanly."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
from processes import Home, Served
from terminal import Terminal

from schedtop.control.client import Client
from schedtop.control.messages import AddRequest
from schedtop.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def in_background(work: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Run `work` in a loop of its own until the block ends."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40), (200, 50)])
def test_the_screen_shows_the_engine_and_leaves_on_q(served: Served, columns: int, lines: int) -> None:
    with Terminal(served.home, columns=columns, lines=lines) as terminal:
        shown = terminal.wait_for_text("simulated")
        assert len(shown.splitlines()) <= lines
        terminal.press("q")
        assert terminal.wait_for_exit() == 0


def test_without_a_terminal_the_state_is_printed_once(served: Served) -> None:
    run = served.home.schedtop()
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout and "max_num_batched_tokens=256" in run.stdout
    assert served.home.json("--once", "--json")["snapshot"]["knobs"]["max_num_batched_tokens"] == 256


def test_a_dead_engine_is_unmistakable_on_the_screen(served: Served) -> None:
    with Terminal(served.home, columns=120, lines=40) as terminal:
        terminal.wait_for_text("simulated")
        served.process.kill()
        served.process.wait()
        terminal.wait_for_text("ENGINE GONE")


def test_without_an_engine_the_screen_says_so_in_one_line(home: Home) -> None:
    with Terminal(home) as terminal:
        terminal.wait_for_text("no engine is running")
        assert terminal.wait_for_exit() == 1


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (120, 40), (200, 50)])
def test_a_knob_turned_on_the_screen_is_acknowledged_with_its_step(served: Served, columns: int, lines: int) -> None:
    with Terminal(served.home, columns=columns, lines=lines) as terminal:
        terminal.wait_for_text("simulated")
        terminal.press("5")
        terminal.wait_for_text("stage, or type a number")
        terminal.press("6", "4", "Enter")
        terminal.wait_for_text("256 → 64")
        assert served.snapshot().knobs.max_num_batched_tokens == 256
        terminal.press("Enter")
        shown = terminal.wait_for_text("max_num_batched_tokens 256 → 64 (generation 1)")
        assert "applied @ step" in shown
        assert all(len(line) <= columns for line in shown.splitlines())
        assert served.snapshot().knobs.max_num_batched_tokens == 64


def test_a_staged_knob_shows_what_it_would_do(served: Served) -> None:
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)

    async def load() -> None:
        async with await Client.connect(str(served.socket), name="load") as client:
            for number in range(12):
                command = AddRequest(request_id=f"r{number}", prompt_token_ids=[number] * 40, sampling=sampling)
                await client.request(command)
            await asyncio.Event().wait()

    with Terminal(served.home, columns=120, lines=40) as terminal, in_background(load):
        served.wait_for(lambda snapshot: snapshot.counters.steps > 150)
        terminal.press("5")
        terminal.wait_for_text("stage, or type a number")
        terminal.press("j", "4", "Enter")
        terminal.wait_for_text("16 → 4")
        shown = terminal.wait_for_text("ITL p99")
        assert "next 30 s" in shown and "preempted" in shown
        assert served.snapshot().generation == 0


def test_a_recording_is_replayed_on_the_screen_without_its_engine(served: Served) -> None:
    path = str(served.home.folder / "engine.rec")
    run = served.home.schedtop("record", path, "--for", "1s", "--interval", "100ms", "--connect", str(served.socket))
    assert run.returncode == 0, run.stderr
    served.process.kill()
    served.process.wait()
    with Terminal(served.home, "replay", path, columns=120, lines=40) as terminal:
        terminal.wait_for_text("REPLAY ⏸ 1x")
        terminal.press("]")
        terminal.wait_for_text("frame 2/")
        terminal.press("x", "P")
        terminal.press("p")
        terminal.wait_for_text("frame 5/")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0
