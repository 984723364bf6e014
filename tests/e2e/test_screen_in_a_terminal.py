"""The screen in a real terminal: it shows the engine, turns a knob that the engine acknowledges, and leaves cleanly."""

import pytest
from processes import Home, Served
from terminal import Terminal

pytestmark = pytest.mark.e2e


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


def test_a_knob_turned_on_the_screen_is_acknowledged_with_its_step(served: Served) -> None:
    with Terminal(served.home, columns=120, lines=40) as terminal:
        terminal.wait_for_text("max_num_batched_tokens")
        terminal.press("5")
        terminal.press("6", "4", "Enter")
        terminal.wait_for_text("256 → 64")
        assert served.snapshot().knobs.max_num_batched_tokens == 256
        terminal.press("Enter")
        terminal.wait_for_text("max_num_batched_tokens 256 → 64 (generation 1)")
        assert served.snapshot().knobs.max_num_batched_tokens == 64
