"""Playbooks on the screen: listed, tried dry before they start, followed live, stopped, and gone with the screen."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from schedtop.control.playbook.foresee import foresee_here
from schedtop.control.playbook.simulated import simulated
from schedtop.control.playbook.target import Target
from schedtop.engine.sim.scenario import parse_scenario

LOAD = b"""
name = "steady"
description = "six requests a second"
horizon_s = 600
[engine]
num_kv_blocks = 4000
max_model_len = 8192
max_num_batched_tokens = 4096
max_num_seqs = 64
[step_time]
base_ms = 20
per_sequence_ms = 0.1
per_prefill_token_ms = 0.05
[[load]]
name = "chat"
rate_per_s = 6.0
prompt = 200
output = 40
"""
NARROW = """
name: narrow
description: Fewer at once.
steps:
  - set: {max_num_seqs: 60}
  - wait: 2s
checks:
  - expect: itl_p99_ms < 5000 over 3s
  - expect: waiting < 500 over 3s
"""
HOPELESS = """
name: hopeless
description: Its check can't pass.
steps:
  - set: {max_num_seqs: 50}
checks:
  - expect: waiting > 400 over 2s
"""


class Ahead:
    """The engine that playbooks run on: time passes on it as often as the test says."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.moments = asyncio.Semaphore(0)
        self.is_free = False
        self.hellos: list[str] = []

    def connect(self, address: str, name: str):
        self.hellos.append(name)

        @asynccontextmanager
        async def connected():
            yield self

        return connected()

    @property
    def welcome(self):
        return self.engine.welcome

    async def request(self, command, timeout_s=30):
        return await self.engine.request(command, timeout_s)

    async def messages(self):
        async for message in self.engine.messages():
            if not self.is_free:
                await self.moments.acquire()
            yield message

    def foresee(self, address: str):
        return foresee_here(Target(self.engine))

    @property
    def max_num_seqs(self) -> int:
        return self.engine.core.scheduler.knobs.max_num_seqs

    async def let(self, desk, count: int) -> None:
        """So many moments of a quarter of a second pass."""
        for _ in range(count):
            self.moments.release()
            await asyncio.sleep(0)
            await desk.news()

    async def until(self, desk, text: str) -> str:
        """Moments pass until the panel says so."""
        while text not in (shown := desk.panel("playbooks")):
            await self.let(desk, 1)
        return shown


@pytest.fixture
def ahead():
    with simulated(parse_scenario(LOAD, "steady")) as (engine, _):
        engine.pass_time(10.0)
        yield Ahead(engine)


@pytest.fixture
def folder(tmp_path):
    for name, text in (("narrow", NARROW), ("hopeless", HOPELESS), ("broken", "name: broken\nsteps:\n  - sett: 1\n")):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def opened(at, busy_link, ahead, folder):
    """The screen with the panel of playbooks in front."""

    @asynccontextmanager
    async def made(link=busy_link, **options):
        options = {"connect": ahead.connect, "foresee": ahead.foresee, "playbooks": folder, **options}
        async with at(link, **options) as desk:
            await desk.press("9")
            while "narrow" not in desk.panel("playbooks"):
                await desk.news()
            yield desk

    return made


async def choose(desk, name: str) -> None:
    """Put the cursor on a playbook."""
    await desk.press("home")
    while f"▶ {name}" not in desk.panel("playbooks"):
        await desk.press("down")


async def open_dry_run(desk) -> str:
    """Enter, and what the dialog then says."""
    await desk.press("enter")
    while not hasattr(desk.app.screen, "heading"):
        await desk.news()
    return desk.panel("dialog")


async def test_shipped_and_own_playbooks_are_listed_with_what_they_are_for(opened) -> None:
    async with opened() as desk:
        shown = desk.panel("playbooks")
        for name in ("protect-itl", "find-budget", "drain-for-maintenance", "narrow", "hopeless"):
            assert name in shown
        await choose(desk, "hopeless")
        assert desk.panel("playbooks").count("Its check can't pass.") == 2, "in its line, and below in full"


async def test_enter_tries_it_dry_and_nothing_is_changed_until_it_is_confirmed(opened, ahead) -> None:
    async with opened() as desk:
        await choose(desk, "narrow")
        ahead.is_free = True
        said = await open_dry_run(desk)
        assert "Start narrow? This is what it would do now:" in said
        assert "set max_num_seqs=60  [change: max_num_seqs 64 -> 60" in " ".join(said.split()).replace(" [", "  [")
        assert "expect itl_p99_ms < 5000 over 3s" in said and "forecast over" in said
        await desk.press("enter")
        assert "Start narrow?" in desk.panel("dialog"), "Enter alone starts nothing"
        await desk.press("n")
        assert ahead.max_num_seqs == 64 and desk.app.plays.num_running == 0
        assert ahead.hellos == ["playbook narrow"]


async def test_a_run_shows_its_steps_and_its_checks_live_and_how_it_ended(opened, ahead) -> None:
    async with opened() as desk:
        await choose(desk, "narrow")
        ahead.is_free = True
        await open_dry_run(desk)
        ahead.is_free = False
        await desk.press("y")
        shown = await ahead.until(desk, "step 2 of 2: wait 2s")
        assert "✓ set max_num_seqs=60  max_num_seqs 64 -> 60" in shown and "▶ wait 2s" in shown and "1 running" in shown
        assert ahead.max_num_seqs == 60
        shown = await ahead.until(desk, "▶ expect itl_p99_ms < 5000 over 3s  itl_p99_ms =")
        shown = await ahead.until(desk, "pass; settings kept")
        assert "✓ expect itl_p99_ms < 5000 over 3s" in shown and "✓ expect waiting < 500 over 3s" in shown
        assert desk.app.plays.num_running == 0 and "running" not in shown.splitlines()[0]


async def test_a_failed_check_is_shown_with_what_became_of_the_change(opened, ahead) -> None:
    async with opened() as desk:
        await choose(desk, "hopeless")
        ahead.is_free = True
        await open_dry_run(desk)
        await desk.press("y")
        shown = await ahead.until(desk, "fail; settings rolled back")
        assert "✗ expect waiting > 400 over 2s" in shown and ahead.max_num_seqs == 64


async def test_enter_on_a_running_one_asks_to_stop_it_and_it_takes_its_changes_back(opened, ahead) -> None:
    async with opened() as desk:
        await choose(desk, "narrow")
        ahead.is_free = True
        await open_dry_run(desk)
        ahead.is_free = False
        await desk.press("y")
        await ahead.until(desk, "step 2 of 2")
        await desk.press("enter")
        assert "Stop narrow?" in desk.panel("dialog")
        await desk.press("n")
        assert ahead.max_num_seqs == 60
        await desk.press("enter", "y")
        shown = await ahead.until(desk, "stopped; rolled back")
        assert ahead.max_num_seqs == 64 and "1 running" not in shown


async def test_leaving_while_one_runs_asks_and_takes_its_changes_back(opened, ahead) -> None:
    async with opened() as desk:
        await choose(desk, "narrow")
        ahead.is_free = True
        await open_dry_run(desk)
        ahead.is_free = False
        await desk.press("y")
        await ahead.until(desk, "step 2 of 2")
        await desk.press("q")
        assert "A playbook runs from this screen" in desk.panel("dialog")
        await desk.press("n")
        assert ahead.max_num_seqs == 60 and desk.app.is_running
        await desk.pilot.press("q")
        await desk.pilot.press("y")
        await desk.app.plays.close()
        assert ahead.max_num_seqs == 64


async def test_a_file_that_cant_be_used_is_listed_with_its_fault_and_not_started(opened, ahead) -> None:
    async with opened() as desk:
        await choose(desk, "broken")
        shown = " ".join(desk.panel("playbooks").replace("│", "").split())
        assert "unknown field 'sett'; did you mean 'set'?" in shown and "broken.yaml:" in shown
        await desk.press("enter")
        assert "sett" in desk.panel("action") and ahead.hellos == []


async def test_an_engine_that_would_refuse_a_step_says_so_instead_of_a_question(opened, ahead, folder) -> None:
    (folder / "narrow.yaml").write_text(NARROW.replace("60", "6000"))
    async with opened() as desk:
        await choose(desk, "narrow")
        ahead.is_free = True
        await desk.press("enter")
        while "6000" not in desk.panel("action"):
            await desk.news()
        assert "ceiling 64" in desk.panel("action") and not hasattr(desk.app.screen, "heading")


async def test_read_only_lists_them_and_starts_none(opened, ahead) -> None:
    async with opened(read_only=True) as desk:
        await desk.press("enter")
        assert "read-only" in desk.panel("action") and ahead.hellos == []


async def test_an_engine_without_knobs_is_not_asked(opened, ahead, busy_link) -> None:
    busy_link.capabilities.remove("SetKnobs")
    async with opened() as desk:
        await desk.press("enter")
        assert "does not take it" in desk.panel("action") and ahead.hellos == []


async def test_a_click_chooses_one_and_the_wheel_goes_on(opened) -> None:
    async with opened() as desk:
        await desk.press("home")
        panel = desk.app._main.board.panels["playbooks"]
        lines = panel.text().splitlines()
        line = next(number for number, text in enumerate(lines) if "find-budget" in text)
        await desk.pilot.click(panel, offset=(8, line))
        await desk.news()
        assert "▶ find-budget" in desk.panel("playbooks")


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_it_fits_every_layout_and_comes_back_with_its_key(opened, size, at, busy_link, folder) -> None:
    async with at(busy_link, size, playbooks=folder) as desk:
        await desk.press("9", "end")
        while "▶ " not in desk.panel("playbooks"):
            await desk.news()
        await desk.press("end")
        assert "▶ narrow" in desk.panel("playbooks")
        assert all(len(line) <= size[0] for line in desk.panel("playbooks").splitlines())
        await desk.press("3")
        assert desk.ui.focus == "requests"
