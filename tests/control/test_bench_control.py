"""`schedtop bench control`: that it measures what it says. How fast things are is no test's business."""

import asyncio
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from schedtop.cli.bench_control import MEDIAN_GOAL, P99_GOAL, TRIP_GOAL_S, report, within_goal
from schedtop.cli.bench_control import control as bench_command
from schedtop.cli.main import cli
from schedtop.control.bench import (
    AGAIN,
    CONFIGURATIONS,
    FIRST,
    NUM_COMMANDS,
    ClientProcess,
    Load,
    Results,
    StepTimes,
    measure,
    served,
    summarise,
)
from schedtop.control.bench_clients import AS_THE_SCREEN, Order, RoundTrips

SMALL = Load(num_requests=3, step_s=0.0005, num_steps=7)
TRIPS = RoundTrips(plain=[0.010, 0.011], audited=[0.012, 0.020])


def results(factors, num_rounds=4):
    """Steps of 10 ms, one in ten of 20 ms, times each configuration's factor."""
    wall = [0.010] * 90 + [0.020] * 10
    cpu = [0.002] * 90 + [0.004] * 10
    return Results(
        rounds={
            name: [StepTimes([t * factor for t in wall], [t * factor for t in cpu], [0.001 * factor])] * num_rounds
            for name, factor in factors.items()
        },
        trips=TRIPS,
    )


ALIKE = dict.fromkeys(CONFIGURATIONS, 1.0)


def test_every_configuration_is_measured_in_every_round_and_commands_are_timed():
    heard = []
    measured = measure(SMALL, 2, heard.append)
    assert heard == [0, 1]
    assert set(measured.rounds) == set(CONFIGURATIONS)
    for rounds in measured.rounds.values():
        assert [(len(t.wall), len(t.cpu), len(t.serving)) for t in rounds] == [(7, 7, 7)] * 2
    assert len(measured.trips.plain) == len(measured.trips.audited) == 2 * NUM_COMMANDS


async def test_the_clients_are_as_many_as_ordered_and_leave_when_told(folder):
    async with asyncio.timeout(60):
        await asyncio.to_thread(_order_clients, folder)


def _order_clients(folder):
    with served(SMALL, folder) as (core, server, path), ClientProcess(path) as clients:
        clients.obey(Order(num_reading=3, num_stalled=1))
        core.take_times(3)
        reading = [c for c in server._connections if c.session.client == "bench"]
        (stalled,) = (c for c in server._connections if c.session.client == "stalled")
        assert [c.subscription for c in reading] == [AS_THE_SCREEN] * 3
        while stalled.is_ready:  # until what it doesn't read has filled its socket
            core.take_times(1)
        before = len(core.take_times(20).wall)
        assert before == 20
        clients.obey(Order())
        while server._connections:
            core.take_times(1)


def test_all_requests_are_in_flight(folder):
    with served(SMALL, folder) as (core, _, _):
        core.take_times(1)
        assert len(core.scheduler.running) == SMALL.num_requests


def test_a_configuration_twice_as_slow_as_no_client_is_told_so_and_misses_the_goal():
    summary = summarise(results({**ALIKE, "ten at 10 Hz": 2.0}))
    slow = summary.configurations["ten at 10 Hz"]
    assert (slow.median_ratio, slow.p99_ratio, slow.cpu_median_ratio, slow.cpu_p99_ratio) == (2, 2, 2, 2)
    assert slow.median_s == pytest.approx(0.020)
    assert slow.p99_s == pytest.approx(0.040)
    assert slow.serving_s == pytest.approx(0.002)
    assert summary.median_spread == summary.p99_spread == 1.0
    assert within_goal(summary) == {name: name != "ten at 10 Hz" for name in CONFIGURATIONS}


def test_a_disturbance_of_one_round_moves_no_figure():
    calm = results(ALIKE)
    hit = StepTimes(wall=[0.5] * 100, cpu=[0.1] * 100, serving=[0.1])
    for name, place in ((FIRST, 0), ("ten at 10 Hz", 3)):
        calm.rounds[name][place] = hit
    summary = summarise(calm)
    assert {figures.p99_ratio for figures in summary.configurations.values()} == {1.0}
    assert all(within_goal(summary).values())


def test_what_is_within_the_spread_of_no_client_against_itself_is_no_slowdown():
    summary = summarise(results({**ALIKE, AGAIN: 1.5, "one at 10 Hz": 1.4}))
    assert summary.median_spread == pytest.approx(1.5)
    assert all(within_goal(summary).values())


def test_the_report_names_configurations_spread_and_round_trips():
    lines = report(summarise(results({**ALIKE, "one at 10 Hz": 1.25})))
    assert [line.split("  ")[0] for line in lines[1:6]] == list(CONFIGURATIONS)
    assert "+25.0 %" in lines[2]
    assert "no client against itself: median +0.0 %" in lines[6]
    assert "command and reply: median 10.00 ms = 1.00 steps" in lines[7]
    assert "the same, audited: median 12.00 ms" in lines[8]


def test_the_command_prints_json_for_programs():
    options = ["--rounds", "1", "--requests", "2", "--steps", "3", "--step-ms", "0.5", "--json"]
    ran = CliRunner().invoke(cli, ["bench", "control", *options])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert told["load"] == {"num_requests": 2, "step_s": 0.0005, "num_steps": 3}
    assert set(told["configurations"]) == set(told["within_goal"]) == set(CONFIGURATIONS)
    assert told["configurations"][FIRST]["median_ratio"] == 1.0
    assert len(told["plain_trip_s"]) == len(told["audited_trip_s"]) == 3


def test_unless_told_otherwise_it_measures_a_thousand_requests_at_10_ms_in_twenty_rounds():
    assert (Load().num_requests, Load().step_s) == (1000, 0.010)
    (rounds,) = (option for option in bench_command.params if option.name == "rounds")
    assert rounds.default == 20
    assert (AS_THE_SCREEN.interval_s, MEDIAN_GOAL, P99_GOAL, TRIP_GOAL_S) == (0.1, 1.01, 1.03, 0.001)


def test_it_runs_without_torch():
    code = "import sys; import schedtop.control.bench, schedtop.cli.bench_control; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
