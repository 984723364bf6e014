"""One playbook on several engines side by side: a result for each, and only where it went wrong it is played again."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from schedtop.control.playbook.report import Report, Result, Settings

Play = Callable[[str], Coroutine[None, None, Report]]
"""Plays on the engine at an address, whatever happens: it raises only when cancelled."""


async def play_on_all(addresses: Sequence[str], play: Play, retries: int = 0) -> dict[str, Report]:
    """The last report of each engine, in the order given."""
    reports = dict(await _round(addresses, play))
    for _ in range(retries):
        failed = [address for address, report in reports.items() if is_worth_retrying(report)]
        if not failed:
            break
        reports |= dict(await _round(failed, play))
    return reports


async def _round(addresses: Sequence[str], play: Play) -> list[tuple[str, Report]]:
    async with asyncio.TaskGroup() as group:
        tasks = [(address, group.create_task(play(address))) for address in addresses]
    return [(address, task.result()) for address, task in tasks]


def is_worth_retrying(report: Report) -> bool:
    """Not where it passed, and not where changes stand that a person has to decide about."""
    return report.result in (Result.FAIL, Result.ERROR) and report.settings in (
        Settings.UNCHANGED,
        Settings.ROLLED_BACK,
    )
