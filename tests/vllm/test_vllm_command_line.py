"""The command line on a real vLLM: changes that roll back, playbooks, recordings, model, audit log, the screen."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import SCHEDTOP, Home
from terminal import Terminal
from vllm_server import Served

from schedtop.control.messages import Pause, Resume

BUSY = [f"prompt number {i}" for i in range(6)]
LONG, SHORT = 3900, 400

BOOK = """
name: fewer-at-a-time
steps:
  - set: {max_num_seqs: 3, max_num_batched_tokens: budget / 4}
  - wait: 1s
checks:
  - {expect: %s, on_fail: rollback, on_no_data: rollback}
"""


@pytest.fixture
def home(served: Served, tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.environment |= {"SCHEDTOP_CONNECT": served.socket, "COLUMNS": "140", "NO_COLOR": "1"}
    return home


async def run(home: Home, *arguments: str, status: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        *SCHEDTOP, *arguments, env=home.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == status, (output + errors).decode()
    return output.decode()


async def knobs(operator: Any) -> tuple[int, int]:
    values = (await operator.look()).knobs
    return values.max_num_batched_tokens, values.max_num_seqs


async def keep_busy(operator: Any, load: Any) -> None:
    """Requests that run until the test is over."""
    for prompt in BUSY:
        load.keep_on(prompt, 1000)
    await operator.settle(lambda snapshot: snapshot.num_running == len(BUSY) and snapshot.step > 50)


async def test_a_change_for_a_while_rolls_back_by_itself_unless_it_is_confirmed(home: Home, operator: Any) -> None:
    await run(home, "knobs", "set", "max_num_seqs=9", "--for", "1s")
    await operator.settle(lambda snapshot: snapshot.knobs.max_num_seqs == 32)
    await run(home, "knobs", "set", "max_num_seqs=8", "--for", "1h")
    await run(home, "knobs", "confirm")
    assert (await operator.look()).knobs.max_num_seqs == 8


async def test_undo_puts_back_what_was_there(home: Home, operator: Any) -> None:
    await run(home, "knobs", "set", "max_num_seqs=7", "max_num_batched_tokens=100", "--reason", "a try")
    assert await knobs(operator) == (100, 7)
    await run(home, "knobs", "undo")
    assert await knobs(operator) == (512, 32)
    rows = json.loads(await run(home, "audit", "--json"))
    assert [row["action"] for row in rows][:2] == ["UndoChange", "SetKnobs"]
    assert rows[1]["reason"] == "a try"


async def test_a_playbook_that_passes_stays_and_one_that_fails_is_taken_back(
    home: Home, operator: Any, load: Any, tmp_path: Path
) -> None:
    await keep_busy(operator, load)
    file = tmp_path / "book.yaml"
    file.write_text(BOOK % "running < 1000 over 500ms")
    await run(home, "play", str(file))
    assert await knobs(operator) == (128, 3)
    await run(home, "knobs", "undo")
    file.write_text(BOOK % "running > 1000 over 500ms")
    await run(home, "play", str(file), status=3)
    assert await knobs(operator) == (512, 32)


async def test_the_shipped_playbooks_say_what_they_would_do(home: Home, operator: Any, load: Any) -> None:
    await keep_busy(operator, load)
    said = await run(home, "play", "short-prompts-first", "--dry-run")
    assert "long_prefill_token_threshold" in said
    assert await knobs(operator) == (512, 32)


async def test_a_shipped_playbook_plays_and_ends(home: Home, operator: Any) -> None:
    await run(home, "play", "drain-for-maintenance")
    assert (await operator.look()).pause.value != "running"


async def test_a_knob_that_vllm_lacks_is_named_before_anything_is_played(home: Home, operator: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        *SCHEDTOP, "play", "--once", "priority-lane", env=home.environment, stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 1
    assert b"preempt_on_arrival" in output + errors
    assert (await operator.look()).knobs.policy.value == "fcfs"


async def test_a_recording_holds_the_steps_and_is_replayed(
    home: Home, operator: Any, load: Any, tmp_path: Path
) -> None:
    file = tmp_path / "vllm.rec"
    first = load.add("already here", LONG)
    await operator.settle(lambda snapshot: snapshot.num_running == 1)
    await operator.request(Pause(mode="keep"))
    recorder = await asyncio.create_subprocess_exec(
        *SCHEDTOP, "record", str(file), "--interval", "0.1", env=home.environment, stdout=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(100):
        while not file.exists() or file.stat().st_size < 2000:  # noqa: ASYNC110  (its first snapshot)
            await asyncio.sleep(0.05)
    began = (await operator.look()).step
    await operator.request(Resume())
    await asyncio.gather(*(load.add(prompt, SHORT) for prompt in BUSY))
    await operator.request(Pause(mode="keep"))
    ended = (await operator.look()).step
    await asyncio.sleep(0.3)  # another snapshot, with which the last steps go
    recorder.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(recorder.wait(), 60) == 0
    exported = (await run(home, "export", str(file), "--what", "steps")).splitlines()[1:]
    steps = [int(line.split(",")[0]) for line in exported]
    assert steps == sorted(set(steps))
    assert len([step for step in steps if began < step <= ended]) > SHORT / 2
    frames = [json.loads(line) for line in (await run(home, "replay", str(file), "--json")).splitlines()]
    assert max(frame["snapshot"]["num_running"] for frame in frames) > 1
    await operator.request(Resume())
    assert not first.cancelled()


async def test_the_step_time_model_is_fitted_from_vllms_steps(home: Home, operator: Any, load: Any) -> None:
    await keep_busy(operator, load)
    for _ in range(4):  # steps of several shapes
        await load.add("x" * 700, 3)
    fitted = json.loads(await run(home, "model", "--json"))
    assert fitted, "no model"


async def test_the_screen_shows_a_loaded_vllm_and_turns_a_knob(home: Home, operator: Any, load: Any) -> None:
    await keep_busy(operator, load)
    terminal = await asyncio.to_thread(lambda: Terminal(home, columns=160, lines=45))
    with terminal:
        await asyncio.to_thread(terminal.wait_for_text, "vLLM")
        await asyncio.to_thread(terminal.wait_for_text, "cmpl-")
        await run(home, "knobs", "set", "max_num_seqs=21")
        await asyncio.to_thread(terminal.wait_for_text, "21")
        terminal.press("q")
        assert await asyncio.to_thread(terminal.wait_for_exit) == 0
