"""The screen while its engine hangs, dies and comes back, and on terminals of other kinds."""

import os
import signal

import pytest
from processes import Home, Served
from terminal import Terminal

pytestmark = pytest.mark.e2e

SIMULATED = (
    "--runner",
    "simulated",
    "--num-kv-blocks",
    "101",
    "--max-num-batched-tokens",
    "256",
    "--max-num-seqs",
    "16",
)


def test_an_engine_that_hangs_is_shown_as_old_data_and_as_live_once_it_goes_on(served: Served) -> None:
    with Terminal(served.home, columns=80, lines=24) as terminal:
        terminal.wait_for_text("● live")
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            shown = terminal.wait_for_text("what is shown is old")
            assert "stale, " in shown and "● live" not in shown
            terminal.press("5", "minus", "?")
            terminal.wait_for_text("What operators ask first")
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
        terminal.press("Escape")
        terminal.wait_for_text("● live")


def test_an_engine_that_was_killed_and_started_again_is_taken_up_with_its_new_boot_id(home: Home) -> None:
    first = Served(home, *SIMULATED)
    with Terminal(home, columns=120, lines=40) as terminal:
        terminal.wait_for_text("● live")
        os.killpg(first.process.pid, signal.SIGKILL)
        first.stop()
        terminal.wait_for_text("ENGINE GONE")
        second = Served(home, *SIMULATED)
        try:
            shown = terminal.wait_for_text("the engine was restarted (boot ")
            assert "● live" in shown
        finally:
            second.stop()


@pytest.mark.parametrize("term", ["linux", "screen", "xterm-256color", "vt100"])
def test_each_kind_of_terminal_shows_the_engine_and_is_left_in_order(served: Served, term: str) -> None:
    with Terminal(served.home, columns=80, lines=24, term=term) as terminal:
        shown = terminal.wait_for_text("live")
        assert shown.isascii() == (term in ("linux", "vt100")), "glyphs only where they are known to be there"
        terminal.press("q")
        assert terminal.wait_for_exit() == 0


def test_a_dumb_terminal_gets_the_state_once_and_no_escape_code(served: Served) -> None:
    with Terminal(served.home, columns=80, lines=24, term="dumb") as terminal:
        shown = terminal.wait_for_text("max_num_batched_tokens=256")
        assert shown.isascii()
        assert terminal.wait_for_exit() == 0


def test_without_colour_nothing_on_screen_is_coloured(served: Served) -> None:
    served.home.environment["NO_COLOR"] = "1"
    with Terminal(served.home, columns=120, lines=40) as terminal:
        terminal.wait_for_text("live")
        terminal.press("5", "j", "-")
        terminal.wait_for_text("16 → 15")
        codes = terminal.colours()
        assert codes == set(), f"colours in use: {codes}"
