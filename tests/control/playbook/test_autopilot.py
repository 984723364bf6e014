"""The autopilot at work: every move in the audit log, the start values back at the end, hands off what others turn."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from schedtop.cli.main import cli
from schedtop.control.messages import GetAudit, Pause, SetKnobs
from schedtop.control.playbook.autopilot import Autopilot, Ending, Flight, Move
from schedtop.control.playbook.simulated import SimulatedEngine, simulated
from schedtop.control.playbook.target import Target, knob_values
from schedtop.engine.sim.autopilot import BUDGET, KNOBS, Decision, bounds_of
from schedtop.engine.sim.goodput import Slo
from schedtop.engine.sim.scenario import Scenario, parse_scenario

SLO = Slo(ttft_s=1.5, itl_s=0.022)
LOAD = b"""
name = "chats"
description = "long prompts, narrow gaps, a budget that is far too large"
horizon_s = 14
[engine]
num_kv_blocks = 8000
max_model_len = 8192
max_num_batched_tokens = 8192
max_num_seqs = 256
[knobs]
max_num_batched_tokens = 4096
[step_time]
base_ms = 8
per_sequence_ms = 0.06
per_prefill_token_ms = 0.02
[[load]]
name = "chat"
rate_per_s = 8.0
prompt = { draw = "uniform", low = 600, high = 1500 }
output = { draw = "uniform", low = 40, high = 160 }
"""


@pytest.fixture
def scenario() -> Scenario:
    return parse_scenario(LOAD, "chats")


def pilot(target: Target, **options: Any) -> Autopilot:
    return Autopilot(target, SLO, bounds_of(target.specs, {}), **{"cpu_limit_s": 0.4, **options})


async def rows(engine: Any, action: str = "SetKnobs") -> list[dict[str, Any]]:
    """Of the audit log, oldest first."""
    ack = await engine.request(GetAudit(limit=100))
    return [row for row in reversed(ack.data["rows"]) if row["action"] == action]


def knobs_of(engine: SimulatedEngine) -> dict[str, Any]:
    return {name: getattr(engine.core.scheduler.knobs, name) for name in KNOBS}


async def test_every_move_is_in_the_audit_log_with_its_reason_and_at_the_end_all_is_as_it_was(
    scenario: Scenario,
) -> None:
    with simulated(scenario, seed=3) as (engine, target):
        before = knobs_of(engine)
        told: list[Move] = []
        flight = await pilot(target, on_move=told.append).run()
        logged = await rows(engine)
        assert knobs_of(engine) == before
    assert flight.moves == told and flight.moves[0].changes[BUDGET][0] == 4096 > flight.moves[0].changes[BUDGET][1]
    assert (flight.ending, flight.detail) == (Ending.RESTORED, "")
    assert [row["reason"] for row in logged] == [f"autopilot: {move.reason}" for move in told] + [
        "autopilot off: the start values"
    ]
    assert [row["step"] for row in logged[:-1]] == [move.applied_at_step for move in told]
    assert all("foreseen in time" in move.reason for move in told)


async def test_switched_off_it_restores_and_returns(scenario: Scenario) -> None:
    with simulated(scenario, seed=4) as (engine, target):
        before = knobs_of(engine)
        flying = pilot(target, on_move=lambda move: flying.off())
        flight = await flying.run()
        assert knobs_of(engine) == before and not target.is_over()
    assert (len(flight.moves), flight.ending, flight.detail) == (1, Ending.RESTORED, "switched off")


async def test_it_ends_by_itself_after_the_time_it_was_given(scenario: Scenario) -> None:
    with simulated(scenario, seed=4) as (_, target):
        await target.begin()
        began = target.now
        flight = await pilot(target).run(for_s=6.0)
        assert 6.0 <= target.now - began < 7.0
    assert (flight.num_decisions, flight.detail) == (2, "")


async def test_cancelled_it_restores_first(scenario: Scenario) -> None:
    with simulated(scenario, seed=4) as (engine, target):
        before = knobs_of(engine)
        moved = asyncio.Event()
        task = asyncio.create_task(pilot(target, on_move=lambda move: moved.set()).run())
        await moved.wait()
        assert knobs_of(engine) != before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert knobs_of(engine) == before


async def test_a_knob_that_an_operator_turns_ends_the_flight_and_keeps_the_operators_value(scenario: Scenario) -> None:
    with simulated(scenario, seed=5) as (engine, target):
        before = knobs_of(engine)
        flying = pilot(target, every_s=2.0)

        def interfere(_: object) -> None:
            if flying._ours and knobs_of(engine)[BUDGET] != 2000:
                engine.core.set_knobs({BUDGET: 2000})

        target.listen(interfere)
        flying._on_move = lambda move: None
        flight = await flying.run()
        assert knobs_of(engine) == {**before, BUDGET: 2000}
    if flight.detail:  # a later move was wanted
        assert "max_num_batched_tokens was turned by somebody else" in flight.detail
    assert flight.ending is Ending.CONFLICT


async def test_a_paused_engine_is_left_alone(scenario: Scenario) -> None:
    with simulated(scenario, seed=6) as (engine, target):
        await target.begin()
        await target.wait_until(5.0)
        await engine.request(Pause(mode="keep"))
        assert await pilot(target).think() is None
        flight = await pilot(target).run(for_s=8.0)
    assert (flight.moves, flight.num_decisions, flight.ending) == ([], 0, Ending.UNCHANGED)


async def test_an_engine_that_refuses_ends_the_flight_with_its_words(scenario: Scenario) -> None:
    with simulated(scenario, seed=7) as (engine, target):
        await target.begin()
        await engine.request(SetKnobs(changes={BUDGET: 4000}, confirm_within_s=600.0))
        flight = await pilot(target).run()
        assert knobs_of(engine)[BUDGET] == 4000
    assert flight.ending is Ending.UNCHANGED and "belongs to change 1" in flight.detail


# ---- on a real socket -------------------------------------------------------------------------------------------

DOOMED = """
import asyncio, sys
from schedtop.control.client import Client
from schedtop.control.playbook import autopilot
from schedtop.control.playbook.target import Target
from schedtop.engine.sim.autopilot import Decision, bounds_of
from schedtop.engine.sim.goodput import Slo

class Decided(autopilot.Autopilot):
    async def think(self):
        changes = {"max_num_seqs": 3}
        return Decision(changes=changes, num_requests=9, worth_now=1, worth_then=9, num_candidates=2, cpu_s=0)

async def main():
    async with await Client.connect(sys.argv[1], name="autopilot") as client:
        target = Target(client)
        moved = lambda move: print("moved", flush=True)
        await Decided(target, Slo(), bounds_of(target.specs, {}), lease_s=1.0, on_move=moved, every_s=600.0).run()

asyncio.run(main())
"""


async def test_what_a_killed_autopilot_had_set_comes_back_by_itself(serve: Any) -> None:
    engine = serve()
    async with engine.client() as client:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DOOMED, str(engine.path), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"moved\n"
        assert (await engine.snapshot(client)).knobs.max_num_seqs == 3
        process.kill()
        await process.communicate()
        while not await rows(client, "UndoChange"):
            pass
        assert (await engine.snapshot(client)).knobs.max_num_seqs == 8


class Decided(Autopilot):
    """Wants one sequence more or fewer each time."""

    async def think(self) -> Decision:
        present = knob_values(self._target.snapshot)["max_num_seqs"]
        return Decision(
            changes={"max_num_seqs": 3 if present != 3 else 4}, num_requests=9, worth_now=1, worth_then=9,
            num_candidates=2, cpu_s=0,
        )  # fmt: skip


async def test_on_a_live_engine_another_operators_change_ends_it_before_its_next_move(serve: Any) -> None:
    engine = serve()
    async with engine.client("autopilot") as client, engine.client("operator") as other:
        target = Target(client)
        await target.begin()
        moved: asyncio.Queue[Move] = asyncio.Queue()
        flying = Decided(target, Slo(), bounds_of(target.specs, {}), every_s=0.5, on_move=moved.put_nowait)
        task = asyncio.create_task(flying.run())
        await moved.get()
        await other.request(SetKnobs(changes={"max_num_seqs": 7}))
        flight: Flight = await task
        assert flight.ending is Ending.CONFLICT and "max_num_seqs was turned by somebody else" in flight.detail
        assert (await engine.snapshot(other)).knobs.max_num_seqs == 7
        assert {row["client"] for row in await rows(other)} == {"autopilot", "operator"}


# ---- the command ------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["autopilot", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing option '--slo'"),
        (["--slo", "ttft=2s"], "'ttft=2s' is no promise: give ttft_p95=DURATION or itl_p99=DURATION"),
        (["--slo", "itl_p99=80"], "has no unit: give itl_p99=80ms or itl_p99=80s"),
        (["--slo", "itl_p99=0ms"], "can't be kept"),
        (["--slo", "itl_p99=80ms", "--bound", "watermark=0..1"], "is no bound: give KNOB=LOW..HIGH for one of"),
        (["--slo", "itl_p99=80ms", "--bound", "max_num_seqs=9..3"], "at most HIGH"),
        (["--slo", "itl_p99=80ms", "--bound", "max_num_seqs=5"], "is no bound"),
        (["--slo", "itl_p99=80ms", "--against", "nowhere"], "no scenario is called 'nowhere'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2) and said in result.output, result.output


def test_bounds_beyond_what_the_engine_was_built_for_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "chats.toml"
    path.write_bytes(LOAD)
    result = run("--slo", "itl_p99=22ms", "--bound", "max_num_seqs=1..9999", "--against", str(path))
    assert result.exit_code == 1 and "max_num_seqs=1..9999" in result.output and "256" in result.output


def test_in_a_scenario_it_tells_moves_ending_and_what_it_was_good_for(tmp_path: Any) -> None:
    path = tmp_path / "chats.toml"
    path.write_bytes(LOAD)
    flight = [
        "--slo",
        "ttft_p95=1.5s",
        "--slo",
        "itl_p99=22ms",
        "--cpu",
        "400ms",
        "--against",
        str(path),
        "--seed",
        "3",
    ]
    result = run(*flight)
    assert result.exit_code == 0, result.output
    assert "max_num_batched_tokens 4096 -> " in result.output and "start values restored" in result.output
    told = json.loads(run(*flight, "--json").output)
    assert told["with"]["num_good"] > told["without"]["num_good"]
    assert f"with it:    {told['with']['num_good']} of {told['with']['num_requests']} in time" in result.output
