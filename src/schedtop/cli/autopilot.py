"""`schedtop autopilot`: keeps promises of latency by turning budget, threshold and cap."""

import asyncio
import contextlib
import os
import re
import signal

import click
import msgspec

from schedtop.cli.engine import DURATION, connect_option, json_option, say_json
from schedtop.control.client import Client
from schedtop.control.discovery import resolve
from schedtop.control.messages import SnapshotUpdate
from schedtop.control.playbook.autopilot import Autopilot, Ending, Flight, Move
from schedtop.control.playbook.simulated import simulated
from schedtop.control.playbook.target import Target
from schedtop.engine.sim.autopilot import KNOBS, Bounds, Decision, bounds_of
from schedtop.engine.sim.goodput import Served, Slo, served
from schedtop.engine.sim.outlook import Tally, weighted_percentile
from schedtop.engine.sim.scenario import Scenario, load_scenario

SLOS = {"ttft_p95": "ttft_s", "itl_p99": "itl_s"}
_NICE = 10


class _SloParam(click.ParamType[tuple[str, float]]):
    name = "NAME=DURATION"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, equals, limit = str(value).partition("=")
        if not equals or name not in SLOS:
            self.fail(f"{value!r} is no promise: give {' or '.join(f'{slo}=DURATION' for slo in SLOS)}", param, ctx)
        if limit[-1:].isdigit():
            self.fail(f"{value!r} has no unit: give {name}={limit}ms or {name}={limit}s", param, ctx)
        seconds = DURATION.convert(limit, param, ctx)
        if not seconds > 0:
            self.fail(f"{value!r}: a limit of 0 can't be kept; give one above 0, such as {name}=80ms", param, ctx)
        return name, seconds


class _BoundParam(click.ParamType[tuple[str, tuple[int, int]]]):
    name = "KNOB=LOW..HIGH"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[int, int]]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\w+)=(\d+)\.\.(\d+)", str(value))
        if match is None or match[1] not in KNOBS:
            self.fail(f"{value!r} is no bound: give KNOB=LOW..HIGH for one of {', '.join(KNOBS)}", param, ctx)
        low, high = int(match[2]), int(match[3])
        if not 1 <= low <= high:
            self.fail(f"{value!r}: LOW must be at least 1 and at most HIGH", param, ctx)
        return match[1], (low, high)


@click.command(epilog="Exit status: 0 unless it was ended by an error or by another operator's change (3). "
                      "How it decides, and when it helps: docs/autopilot.md.")  # fmt: skip
@click.option("--slo", "slos", type=_SloParam(), multiple=True, required=True,
              help="A promise: ttft_p95=2s or itl_p99=80ms; may be given twice.")  # fmt: skip
@click.option("--bound", "bounds", type=_BoundParam(), multiple=True, help="Turn a knob only so far.")
@click.option("--every", type=DURATION, default=3.0, show_default="3s", help="From one look to the next.")
@click.option("--cpu", type=DURATION, default=2.0, show_default="2s", help="CPU time of one decision at most.")
@click.option("--for", "for_s", type=DURATION, help="Switch off by itself after so long.")
@click.option("--dry-run", is_flag=True, help="Decide once, say what would be set, change nothing.")
@click.option("--against", metavar="SCENARIO", help="Fly in a scenario, in virtual time, without an engine.")
@click.option("--seed", type=int, help="With --against: draw another load than the file's.")
@connect_option
@json_option
def autopilot(
    slos: tuple[tuple[str, float], ...], bounds: tuple[tuple[str, tuple[int, int]], ...], every: float, cpu: float,
    for_s: float | None, dry_run: bool, against: str | None, seed: int | None, connect: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Choose budget, threshold and sequence cap every few seconds by forecast, so that requests come in time.

    Every move is in the audit log with its reason. Ctrl-C or SIGTERM is the off switch: the start values come back; if
    it is killed, the engine brings them back. A knob that somebody else turns ends it.
    """
    slo = Slo(**{SLOS[name]: seconds for name, seconds in slos})
    if every <= 0 or cpu <= 0:
        raise click.UsageError("--every and --cpu must be above 0")
    plan = _Plan(slo, dict(bounds), every, cpu, for_s)
    if against is not None:
        _fly_in(load_scenario(against), seed, plan, as_json)
        return
    with contextlib.suppress(OSError):
        os.nice(_NICE)  # it decides in this process, beside the engine
    asyncio.run(_fly_live(resolve(connect), plan, dry_run, as_json))


class _Plan(msgspec.Struct, frozen=True):
    """What the command line asked for."""

    slo: Slo
    bounds: dict[str, tuple[int, int]]
    every_s: float
    cpu_limit_s: float
    for_s: float | None

    def pilot(self, target: Target, is_quiet: bool) -> Autopilot:
        """One flight on a target."""
        began = target.now if target.is_live else 0.0
        return Autopilot(
            target,
            self.slo,
            self.bounds_on(target),
            every_s=self.every_s,
            cpu_limit_s=self.cpu_limit_s,
            on_move=(lambda move: None) if is_quiet else (lambda move: click.echo(_move_line(move, began))),
        )

    def bounds_on(self, target: Target) -> Bounds:
        """These bounds on an engine of a certain size. Raises `SchedtopError`."""
        return bounds_of(target.specs, self.bounds)


# ---- on a live engine -------------------------------------------------------------------------------------------


async def _fly_live(address: str, plan: _Plan, dry_run: bool, as_json: bool) -> None:
    async with await Client.connect(address, name="autopilot") as client:
        target = Target(client)
        await target.begin()
        if dry_run:
            decision = await plan.pilot(target, is_quiet=True).think()
            say_json(decision) if as_json else click.echo(_decision_line(decision))
            return
        seen = Tally(target.now)
        refused_before = target.snapshot.counters.refused
        stop = target.listen(lambda update: _take(seen, update))
        pilot = plan.pilot(target, as_json)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, pilot.off)
        flight = await pilot.run(plan.for_s)
        stop()
        num_refused = target.snapshot.counters.refused - refused_before
        if as_json:
            say_json({"flight": flight, "seen": _seen(seen, plan.slo, num_refused)})
        else:
            click.echo("\n".join([_ending_line(flight), *_seen_lines(seen, plan.slo, num_refused)]))
    _exit(flight)


def _take(seen: Tally, update: SnapshotUpdate) -> None:
    for record in update.steps:
        seen.add(record)


def _seen(seen: Tally, slo: Slo, num_refused: int) -> dict[str, float | int | None]:
    """What came of it, as far as steps tell: shares in time, refused, gaps."""
    num_gaps = sum(count for _, count in seen.itl)
    in_time = sum(slo.ttft_s is None or seconds <= slo.ttft_s for seconds in seen.ttft)
    short = sum(count for seconds, count in seen.itl if slo.itl_s is None or seconds <= slo.itl_s)
    return {
        "first_tokens": len(seen.ttft),
        "first_tokens_in_time": in_time,
        "gaps": num_gaps,
        "gaps_in_time": short,
        "itl_p99_s": weighted_percentile(seen.itl, 0.99) if num_gaps else None,
        "refused": num_refused,
    }


def _seen_lines(seen: Tally, slo: Slo, num_refused: int) -> list[str]:
    found = _seen(seen, slo, num_refused)
    gap = found["itl_p99_s"]
    return [
        f"first tokens in time: {found['first_tokens_in_time']} of {found['first_tokens']}",
        f"gaps in time: {found['gaps_in_time']} of {found['gaps']}"
        + (f", p99 {gap * 1e3:.0f} ms" if gap is not None else ""),
        f"refused: {num_refused}",
    ]


# ---- in a scenario ----------------------------------------------------------------------------------------------


def _fly_in(scenario: Scenario, seed: int | None, plan: _Plan, as_json: bool) -> None:
    with simulated(scenario, seed) as (engine, target):
        flight = asyncio.run(plan.pilot(target, as_json).run(plan.for_s))
        engine.finish()
        with_it = served(engine.simulation.result, plan.slo)
    without = scenario.simulation(seed=seed)
    left_alone = served(without.run(scenario.horizon_s), plan.slo)
    without.core.shutdown()
    if as_json:
        say_json({"flight": flight, "with": with_it, "without": left_alone})
    else:
        lines = [
            _ending_line(flight),
            f"with it:    {_served_words(with_it)}",
            f"left alone: {_served_words(left_alone)}",
        ]
        click.echo("\n".join(lines))
    _exit(flight)


def _served_words(found: Served) -> str:
    gap = "-" if found.itl_p99_s is None else f"{found.itl_p99_s * 1e3:.0f} ms"
    return (
        f"{found.num_good} of {found.num_requests} in time ({found.goodput_per_s:.2f} a second), "
        f"{found.num_refused} refused, p99 gap {gap}"
    )


# ---- words ------------------------------------------------------------------------------------------------------


def _move_line(move: Move, began: float) -> str:
    changes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in move.changes.items())
    return f"{move.mono - began:7.1f} s  {changes}  (step {move.applied_at_step}; {move.reason})"


def _decision_line(decision: Decision | None) -> str:
    if decision is None:
        return "nothing to decide: the engine is paused, or too few steps were seen to model their time"
    if not decision.changes:
        return f"would leave all as it is; {decision.reason}"
    changes = ", ".join(f"{name}={value}" for name, value in decision.changes.items())
    return f"would set {changes}; {decision.reason}"


def _ending_line(flight: Flight) -> str:
    why = f": {flight.detail}" if flight.detail else ""
    return f"{flight.num_decisions} looks, {len(flight.moves)} moves, {flight.ending}{why}"


def _exit(flight: Flight) -> None:
    if flight.ending in (Ending.CONFLICT, Ending.UNKNOWN) or (flight.detail and flight.detail != "switched off"):
        raise SystemExit(3)
