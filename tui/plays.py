"""Playbooks that the screen runs: found, tried dry, started, stopped, each on a connection of its own. Draws nothing.

How a playbook runs is `control/playbook/`'s, which is loaded when one is looked at, so that watching stays light. Runs
are this screen's: they take their changes back when it ends, by a lease even if it is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedtop.engine.errors import SchedtopError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from schedtop.control.playbook.events import Progress, RunEvent
    from schedtop.control.playbook.plan import Foresee
    from schedtop.control.playbook.target import Connection

Connect = Callable[[str, str], "AbstractAsyncContextManager[Connection]"]
"""(address, name to say hello with) -> a connection. Entering it raises `SchedtopError`."""
ForeseeAt = Callable[[str], "Foresee"]
END_WITHIN_S = 5.0
"""For all runs to take their changes back when the screen ends; past it, their leases do."""


@dataclass(frozen=True, slots=True)
class Play:
    """A playbook as the panel shows it. `fault`: why its file can't be used."""

    name: str
    description: str = ""
    fault: str = ""
    is_running: bool = False
    progress: Progress | None = None
    """Of the run under way, or of the last one from here."""
    ending: str = ""
    """How the last one ended."""


@asynccontextmanager
async def connected(address: str, name: str) -> AsyncIterator[Connection]:
    """A client of an engine."""
    from schedtop.control.client import Client

    async with await Client.connect(address, name=name) as client:
        yield client


def foresee_at(address: str) -> Foresee:
    """Forecasts by a process of their own."""
    from schedtop.control.playbook.foresee import foresee_apart

    return foresee_apart(address)


class Plays:
    """The playbooks of every engine on screen. `changed` is called when there is something new to draw."""

    def __init__(
        self, changed: Callable[[], None], connect: Connect = connected, foresee: ForeseeAt = foresee_at,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._changed = changed
        self._connect = connect
        self._foresee = foresee
        self._folder = folder
        self._found: tuple[Play, ...] | None = None
        self._plays: dict[tuple[str, str], Play] = {}
        """(engine, playbook) -> its run."""
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def of(self, target: str) -> Sequence[Play]:
        """All playbooks as they stand on an engine; empty until `find` has looked."""
        return [self._plays.get((target, play.name), play) for play in self._found or ()]

    @property
    def num_running(self) -> int:
        """Runs under way, on all engines."""
        return len(self._tasks)

    async def find(self) -> None:
        """Read the playbooks there are, once."""
        if self._found is None:
            self._found = await asyncio.to_thread(_read, self._folder)
            self._changed()

    async def try_dry(self, target: str, name: str) -> list[str]:
        """What a run would do, step by step, with forecasts. Raises `SchedtopError`."""
        from schedtop.control.playbook.plan import plan
        from schedtop.control.playbook.reader import load_playbook
        from schedtop.control.playbook.shipped import find_named
        from schedtop.control.playbook.target import Target
        from schedtop.control.playbook.words import plan_lines

        playbook = load_playbook(find_named(name, self._folder))
        async with self._connect(target, f"playbook {name}") as connection:
            return plan_lines(await plan(playbook, Target(connection), self._foresee(target)))

    def start(self, target: str, name: str) -> None:
        """Begin a run, unless it is under way."""
        place = (target, name)
        if place not in self._tasks:
            self._tasks[place] = asyncio.create_task(self._run(place), name=f"playbook {name}")

    async def stop(self, target: str, name: str) -> None:
        """End a run; it takes its changes back first."""
        if task := self._tasks.get((target, name)):
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """End all runs."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=END_WITHIN_S)

    async def _run(self, place: tuple[str, str]) -> None:
        from schedtop.control.playbook.events import Progress, report_in_words
        from schedtop.control.playbook.reader import load_playbook
        from schedtop.control.playbook.repeat import keep_running
        from schedtop.control.playbook.shipped import find_named
        from schedtop.control.playbook.target import Target

        target, name = place
        play = next(play for play in self._found or () if play.name == name)
        try:
            playbook = load_playbook(find_named(name, self._folder))
            progress = Progress.of(playbook)
            self._show(place, replace(play, is_running=True, progress=progress))

            def note(event: RunEvent) -> None:
                progress.take(event)
                self._changed()

            async with self._connect(target, f"playbook {name}") as connection:
                report = await keep_running(playbook, Target(connection), on_event=note)
            ending = report_in_words(report).removeprefix(f"{name}: ")
        except asyncio.CancelledError:
            ending = f"stopped; {progress.doing}"
        except SchedtopError as error:
            ending = f"error: {error}"
        finally:
            del self._tasks[place]
        self._show(place, replace(self._plays.get(place, play), is_running=False, ending=ending))

    def _show(self, place: tuple[str, str], play: Play) -> None:
        self._plays[place] = play
        self._changed()


def _read(folder: Path | None) -> tuple[Play, ...]:
    from schedtop.control.playbook.reader import BadPlaybook, load_playbook
    from schedtop.control.playbook.shipped import named_playbooks

    def read(name: str, path: Path) -> Play:
        try:
            return Play(name, " ".join(load_playbook(path).description.split()))
        except BadPlaybook as error:
            return Play(name, fault=str(error).replace(str(path), path.name))

    return tuple(read(name, path) for name, path in named_playbooks(folder).items())
