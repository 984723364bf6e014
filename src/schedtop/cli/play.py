"""`schedtop play`: runs a playbook from the command line. The running itself is `control/playbook/`'s."""

import asyncio
import signal
import sys
from collections.abc import Callable

import click

from schedtop.cli.engine import connect_option, json_option, say_json
from schedtop.control.client import Client
from schedtop.control.discovery import resolve
from schedtop.control.playbook.expr import parse_duration
from schedtop.control.playbook.plan import plan
from schedtop.control.playbook.report import CheckOutcome, PlannedStep, Report, Result, Settings, changes_in_words
from schedtop.control.playbook.runner import PlaybookRun
from schedtop.control.playbook.schema import Playbook, load_playbook
from schedtop.control.playbook.shipped import find_playbook, shipped_playbooks

EXIT_STATUS = {Result.PASS: 0, Result.ERROR: 1, Result.FAIL: 3, Result.NO_DATA: 4}
"""2 is a wrong command line."""


@click.command(epilog="Exit status: 0 pass, 3 fail, 4 no data, 1 error. The format: docs/playbooks.md.")
@click.argument("file", required=False)
@click.option("--dry-run", is_flag=True, help="Say what each step would do; change nothing.")
@click.option("--once", is_flag=True, help="Run the steps now, whatever the playbook's `when` says.")
@click.option("--list", "is_list", is_flag=True, help="List the playbooks that come with schedtop.")
@connect_option
@json_option
def play(file: str | None, dry_run: bool, once: bool, is_list: bool, connect: str | None, as_json: bool) -> None:
    """Run playbook FILE (or a shipped one, by name): set knobs, wait, check, roll back if a check fails.

    A playbook with a `when` waits for its moment, again and again, until a run doesn't pass or you end it; ended with
    Ctrl-C or SIGTERM it takes its changes back first.
    """
    if is_list:
        for path in shipped_playbooks():
            click.echo(f"{path.stem:24}{load_playbook(path).description.strip()}")
        return
    if file is None:
        raise click.UsageError("name a playbook file, or a shipped one (see --list)")
    playbook, target = load_playbook(find_playbook(file)), resolve(connect)
    if dry_run:
        _print_plan(asyncio.run(_plan(playbook, target)), as_json)
        return
    say: Callable[[str], None] = (lambda line: None) if as_json else click.echo
    report = asyncio.run(_run(playbook, target, once, say))
    if as_json:
        say_json(report)
    sys.exit(EXIT_STATUS[report.result])


async def _plan(playbook: Playbook, target: str) -> list[PlannedStep]:
    async with await Client.connect(target, name=f"playbook {playbook.name}") as client:
        return await plan(playbook, client)


async def _run(playbook: Playbook, target: str, once: bool, say: Callable[[str], None]) -> Report:
    """SIGINT and SIGTERM cancel the run, which then rolls back."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        while True:
            report = await _run_one(playbook, target, once, say)
            say(_in_words(report))
            if once or playbook.when is None or report.result is not Result.PASS:
                return report
            await asyncio.sleep(parse_duration(playbook.cooldown))
    except asyncio.CancelledError:
        raise click.ClickException("interrupted; what this run had changed was rolled back") from None


async def _run_one(playbook: Playbook, target: str, once: bool, say: Callable[[str], None]) -> Report:
    async with await Client.connect(target, name=f"playbook {playbook.name}") as client:
        run = PlaybookRun(playbook, client, _ask if sys.stdin.isatty() else None, say)
        return await run.run(waits_for_moment=not once)


def _ask(checks: list[CheckOutcome]) -> bool:
    for check in checks:
        click.echo(f"{check.result}: expect {check.expect}; {check.detail}", err=True)
    return click.confirm("The settings are still in force. Roll back?", default=True, err=True)


def _print_plan(planned: list[PlannedStep], as_json: bool) -> None:
    if as_json:
        say_json(planned)
        return
    for number, step in enumerate(planned, 1):
        more = "; ".join(filter(None, (changes_in_words(step.changes) if step.changes else "", step.detail)))
        click.echo(f"{number}. {step.what}  [{step.verdict}{': ' if more else ''}{more}]")
    click.echo("dry run: nothing was changed")


def _in_words(report: Report) -> str:
    line = f"{report.playbook}: {report.result}; settings {report.settings}"
    if report.settings is Settings.HELD:
        line += " (take them back with `u` on the screen or `schedtop knobs undo`)"
    return f"{line}: {report.detail}" if report.detail else line
