"""Several engines: a result for each, and only where it went wrong it is played again. Failed readings count."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from virtual_engine import VirtualEngine

from schedtop.control.client import Message
from schedtop.control.messages import Goodbye
from schedtop.control.playbook.fleet import play_on_all
from schedtop.control.playbook.reader import parse_playbook
from schedtop.control.playbook.report import Report, Result, Settings
from schedtop.control.playbook.runner import PlaybookRun
from schedtop.control.playbook.target import Connection, Target


def report(result: Result, settings: Settings) -> Report:
    return Report(playbook="t", result=result, settings=settings, steps=[], checks=[])


async def test_only_the_engines_where_it_failed_and_nothing_stands_are_retried() -> None:
    outcomes = {
        "good": [report(Result.PASS, Settings.KEPT)],
        "flaky": [report(Result.ERROR, Settings.ROLLED_BACK), report(Result.PASS, Settings.KEPT)],
        "held": [report(Result.FAIL, Settings.HELD)],
        "gone": [report(Result.ERROR, Settings.UNCHANGED)] * 3,
    }
    played: list[str] = []

    async def play(address: str) -> Report:
        played.append(address)
        return outcomes[address][played.count(address) - 1]

    reports = await play_on_all(list(outcomes), play, retries=2)
    assert {name: played.count(name) for name in outcomes} == {"good": 1, "flaky": 2, "held": 1, "gone": 3}
    assert [one.result for one in reports.values()] == [Result.PASS, Result.PASS, Result.FAIL, Result.ERROR]
    assert list(reports) == list(outcomes)


class Dropping:
    """An engine whose connection breaks after some moments; each new connection to it breaks at once."""

    def __init__(self, engine: VirtualEngine, num_moments: int) -> None:
        self.welcome = engine.welcome
        self.request: Any = engine.request
        self._engine = engine
        self._num_moments = num_moments

    async def messages(self) -> AsyncIterator[Message]:
        num_sent = 0
        async for message in self._engine.messages():
            if num_sent == self._num_moments:
                break
            num_sent += 1
            yield message
        yield Goodbye(reason="the connection broke")


BOOK = """name: t
steps:
  - set: {max_num_seqs: 4}
checks:
  - {expect: running == 8 over 10s, max_errors: %d, on_fail: rollback}
"""


@pytest.mark.parametrize(("max_errors", "moments_after"), [(1, 0), (3, 0)])
async def test_readings_that_fail_count_as_a_failed_check_after_so_many(
    engine: VirtualEngine, max_errors: int, moments_after: int
) -> None:
    connections: list[Connection] = []

    async def reconnect() -> Connection:
        connections.append(Dropping(engine, moments_after))
        return connections[-1]

    engine.load(8)
    target = Target(Dropping(engine, 3), reconnect=reconnect)
    outcome = await PlaybookRun(parse_playbook(BOOK % max_errors, "t"), target).run()
    assert (outcome.result, outcome.settings) == (Result.FAIL, Settings.ROLLED_BACK)
    assert f"{max_errors} readings in a row failed" in outcome.checks[0].detail
    assert len(connections) == max_errors - 1
    assert engine.core.scheduler.knobs.max_num_seqs == 64


async def test_a_connection_that_comes_back_in_time_costs_a_check_nothing(engine: VirtualEngine) -> None:
    async def reconnect() -> Connection:
        return engine

    engine.load(8)
    target = Target(Dropping(engine, 3), reconnect=reconnect)
    outcome = await PlaybookRun(parse_playbook(BOOK % 2, "t"), target).run()
    assert (outcome.result, outcome.settings) == (Result.PASS, Settings.KEPT)
