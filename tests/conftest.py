"""Limits that no test can miss.

pytest-timeout's signal raises in whatever callback the event loop happens to run, which logs it and goes on; and a
test that it does end may wait for ever for a child process or a thread on its way out. One such test would hold up
the whole suite.
"""

import asyncio
import faulthandler
import functools
import inspect
import os
from collections.abc import Generator

import pytest

AWAITED_LIMIT_S = 200.0
"""For a coroutine test: less than the `timeout` of pyproject.toml, which stays for all that doesn't await."""
HARD_LIMIT_S = 600.0
"""Past it, with fixtures and all, every thread's stack is printed and the run ends on the spot."""

stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[stderr] = os.dup(2)  # not captured yet


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.dump_traceback_later(HARD_LIMIT_S, exit=True, file=item.config.stash[stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in this process must not lower its priority: no test after them would get it back."""
    monkeypatch.setattr(os, "nice", lambda increment: 0)


def _limited(test, limit_s: float):
    @functools.wraps(test)
    async def run(*args, **kwargs) -> None:
        async with asyncio.timeout(limit_s):
            await test(*args, **kwargs)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _limited(item.obj, AWAITED_LIMIT_S)
