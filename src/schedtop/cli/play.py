"""`schedtop play`: playbooks from the command line. The running itself is `control/playbook/`'s."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from schedtop.cli.engine import DURATION, json_option, say_json, table
from schedtop.cli.play_words import trial_lines
from schedtop.control.client import Client
from schedtop.control.discovery import discover, resolve
from schedtop.control.playbook.events import CheckSeen, MomentAwaited, RunEvent, in_words
from schedtop.control.playbook.fleet import play_on_all
from schedtop.control.playbook.foresee import foresee_apart, foresee_here
from schedtop.control.playbook.plan import plan
from schedtop.control.playbook.reader import load_playbook
from schedtop.control.playbook.repeat import keep_running
from schedtop.control.playbook.report import CheckOutcome, PlannedStep, Report, Result, Settings
from schedtop.control.playbook.runner import nobody
from schedtop.control.playbook.schema import Playbook, json_schema
from schedtop.control.playbook.shipped import find_playbook, shipped_playbooks
from schedtop.control.playbook.simulated import MIDNIGHT, simulated
from schedtop.control.playbook.target import Target
from schedtop.control.playbook.trial import try_on_recording, try_on_scenario
from schedtop.control.playbook.words import plan_lines
from schedtop.control.recorder import Recording, is_recording
from schedtop.engine.errors import SchedtopError
from schedtop.engine.sim.scenario import load_scenario

EXIT_STATUS = {Result.PASS: 0, Result.ERROR: 1, Result.FAIL: 3, Result.NO_DATA: 4}
"""2 is a wrong command line."""
WORST_FIRST = (Result.ERROR, Result.FAIL, Result.NO_DATA, Result.PASS)

_TIME = click.DateTime(["%H:%M", "%Y-%m-%dT%H:%M"])


@click.command(epilog="Exit status: 0 pass, 3 fail, 4 no data, 1 error (of several engines: the worst). "
                      "The format: docs/playbooks.md.")  # fmt: skip
@click.argument("file", required=False)
@click.option("--dry-run", is_flag=True, help="Say what each step would do, with a forecast; change nothing.")
@click.option("--once", is_flag=True, help="Run the steps now, whatever the playbook's `when` and `schedule` say.")
@click.option("--against", metavar="SCENARIO|RECORDING", help="Try it without an engine, in virtual time.")
@click.option("--seed", type=int, help="With --against SCENARIO: draw another load than the file's.")
@click.option("--after", type=DURATION, default=0.0, help="With --against SCENARIO: begin so long into it.")
@click.option("--begins", type=_TIME, help="With --against SCENARIO: the time of day (UTC) at which it begins.")
@click.option("--list", "is_list", is_flag=True, help="List the playbooks that come with schedtop.")
@click.option("--check", is_flag=True, help="Only read FILE and say what is wrong in it.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of playbook files, for editors.")
@click.option("--connect", multiple=True, metavar="PATH|URL", help="Engine to play on; may be given several times.")
@click.option("--all", "on_all", is_flag=True, help="Play on every engine that is running here.")
@click.option("--retries", type=click.IntRange(0, 100), default=0, help="Play again where it failed, so many times.")
@json_option
def play(
    file: str | None, dry_run: bool, once: bool, against: str | None, seed: int | None, after: float,
    begins: datetime | None, is_list: bool, check: bool, schema: bool, connect: tuple[str, ...], on_all: bool,
    retries: int, as_json: bool,
) -> None:  # fmt: skip
    """Run playbook FILE (or a shipped one, by name): set knobs, wait, check, roll back if a check fails.

    A playbook with a `when` or a `schedule` waits for its moment, again and again, until a run doesn't pass or you end
    it; ended with Ctrl-C or SIGTERM it takes its changes back first, and if it is killed, the engine does.
    """
    if schema:
        say_json(json_schema())
        return
    if is_list:
        for path in shipped_playbooks():
            click.echo(f"{path.stem:24}{load_playbook(path).description.strip()}")
        return
    if file is None:
        raise click.UsageError("name a playbook file, or a shipped one (see --list)")
    playbook = load_playbook(find_playbook(file))
    if check:
        click.echo(f"{playbook.name}: {len(playbook.steps)} steps, {len(playbook.checks)} checks, nothing wrong")
    elif against is not None:
        _play_against(playbook, against, seed, after, begins, once=once, dry_run=dry_run, as_json=as_json)
    else:
        _play_live(playbook, _addresses(connect, on_all), dry_run, once, retries, as_json)


def _addresses(connect: Sequence[str], on_all: bool) -> list[str]:
    if on_all and connect:
        raise click.UsageError("--all and --connect both say where to play: give one")
    if on_all:
        return discover() or [resolve(None)]
    return list(dict.fromkeys(connect)) or [resolve(None)]


# ---- on live engines --------------------------------------------------------------------------------------------


def _play_live(
    playbook: Playbook, addresses: list[str], dry_run: bool, once: bool, retries: int, as_json: bool
) -> None:
    if dry_run:
        plans = asyncio.run(_plan_all(playbook, addresses))
        if as_json:
            say_json(plans if len(addresses) > 1 else plans[addresses[0]])
            return
        for address, planned in plans.items():
            click.echo("\n".join([f"on {address}:"] * (len(addresses) > 1) + plan_lines(planned)))
        click.echo("dry run: nothing was changed")
        return
    reports = asyncio.run(_Live(playbook, once, as_json, many=len(addresses) > 1).run(addresses, retries))
    if as_json:
        say_json(reports if len(addresses) > 1 else reports[addresses[0]])
    elif len(addresses) > 1:
        rows = [(r.target or a, r.result, r.settings, r.detail) for a, r in reports.items()]
        click.echo(table(("engine", "result", "settings", ""), rows, left=(0, 1, 2, 3)))
    results = [report.result for report in reports.values()]
    sys.exit(EXIT_STATUS[min(results, key=WORST_FIRST.index)])


async def _plan_all(playbook: Playbook, addresses: list[str]) -> dict[str, list[PlannedStep]]:
    plans = {}
    for address in addresses:
        async with await Client.connect(address, name=f"playbook {playbook.name}") as client:
            plans[address] = await plan(playbook, Target(client), foresee_apart(address))
    return plans


class _Live:
    """One command's runs on live engines, told on the terminal."""

    def __init__(self, playbook: Playbook, once: bool, as_json: bool, many: bool) -> None:
        self._playbook = playbook
        self._once = once
        self._is_quiet = as_json
        self._many = many
        self._asking = threading.Lock()

    async def run(self, addresses: list[str], retries: int) -> dict[str, Report]:
        """SIGINT and SIGTERM cancel the runs, which then roll back."""
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await play_on_all(addresses, self._play, retries)
        except asyncio.CancelledError:
            raise click.ClickException("interrupted; what this run had changed was rolled back") from None

    async def _play(self, address: str) -> Report:
        """Play on one engine; that it can't be reached is that engine's result."""
        async with contextlib.AsyncExitStack() as stack:

            async def connect() -> Client:
                return await stack.enter_async_context(
                    await Client.connect(address, name=f"playbook {self._playbook.name}")
                )

            try:
                client = await connect()
            except SchedtopError as error:
                if not self._many:
                    raise
                return _unreached(self._playbook, address, str(error))
            target = Target(client, reconnect=connect)
            decide = self._ask if sys.stdin.isatty() and not self._is_quiet else None
            say = _Teller(f"{target.name}: " if self._many else "", self._is_quiet)
            return await keep_running(self._playbook, target, once=self._once, decide=decide, on_event=say)

    def _ask(self, checks: list[CheckOutcome]) -> bool:
        """Called in a thread; engines ask one after the other."""
        with self._asking:
            for check in checks:
                click.echo(f"{check.result}: expect {check.expect}; {check.detail}", err=True)
            return click.confirm("The settings are still in force. Roll back?", default=True, err=True)


def _unreached(playbook: Playbook, address: str, why: str) -> Report:
    return Report(
        playbook=playbook.name, target=address, result=Result.ERROR, settings=Settings.UNCHANGED,
        steps=[], checks=[], detail=why,
    )  # fmt: skip


class _Teller:
    """Prints events: each once, and of those that repeat every second only what is new."""

    def __init__(self, prefix: str, is_quiet: bool) -> None:
        self._prefix = prefix
        self._is_quiet = is_quiet
        self._last: dict[str, str] = {}

    def __call__(self, event: RunEvent) -> None:
        if self._is_quiet or isinstance(event, CheckSeen) or self._is_repeated(event):
            return
        for line in filter(None, in_words(event).split("\n")):
            click.echo(f"{self._prefix}{line}")

    def _is_repeated(self, event: RunEvent) -> bool:
        if not isinstance(event, MomentAwaited):
            self._last.clear()
            return False
        is_known = self._last.get("what") == event.what
        self._last["what"] = event.what
        return is_known


# ---- without an engine ------------------------------------------------------------------------------------------


def _play_against(
    playbook: Playbook, source: str, seed: int | None, after: float, begins: datetime | None,
    *, once: bool, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    if is_recording(Path(source)):
        _play_against_recording(playbook, Path(source), as_json)
        return
    scenario = load_scenario(source)
    begins_at = _wall(begins)
    if dry_run:
        with simulated(scenario, seed, begins_at) as (_, target):
            planned = asyncio.run(plan(playbook, target, foresee_here(target)))
        say_json(planned) if as_json else click.echo("\n".join([*plan_lines(planned), "dry run: nothing was changed"]))
        return
    trial = asyncio.run(
        try_on_scenario(
            playbook,
            scenario,
            seed,
            once=once,
            after_s=after,
            begins_at=begins_at,
            on_event=nobody if as_json else _tell_timed,
        )
    )
    if as_json:
        say_json(trial)
    else:
        click.echo("\n".join(trial_lines(trial)))
    worst = min((report.result for report in trial.reports), key=WORST_FIRST.index, default=Result.NO_DATA)
    sys.exit(EXIT_STATUS[worst])


def _wall(begins: datetime | None) -> float:
    """A time of day is that of the scenario's Monday."""
    if begins is None:
        return MIDNIGHT
    if begins.year == 1900:
        return MIDNIGHT + begins.hour * 3600.0 + begins.minute * 60.0
    return begins.replace(tzinfo=UTC).timestamp()


def _tell_timed(event: RunEvent) -> None:
    """An event with the scenario's time in front."""
    if isinstance(event, CheckSeen | MomentAwaited):
        return
    for line in filter(None, in_words(event).split("\n")):
        click.echo(f"{event.mono:7.1f} s  {line}")


def _play_against_recording(playbook: Playbook, path: Path, as_json: bool) -> None:
    moments = asyncio.run(try_on_recording(playbook, Recording(path)))
    if as_json:
        say_json(moments)
        return
    for moment in moments:
        click.echo(f"{moment.after_s:.1f} s into the recording (step {moment.step}) it would have begun:")
        click.echo("\n".join(f"  {line}" for line in plan_lines(moment.planned)))
    click.echo(f"{playbook.name}: {len(moments)} moments; what its changes would have done, a recording can't tell")
