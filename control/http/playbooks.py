"""`/control/v1/playbooks`: list playbooks, try one dry, start, stop, and follow what runs.

A client names a shipped playbook, one of the operator's folder, or sends the file's text: no path from a client is ever
opened. Runs live in the gateway, each on a connection of its own, and take their changes back when the gateway ends
(by a lease even if it is killed). How a playbook runs is `control/playbook/`'s.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter

from schedtop.control.client import Client
from schedtop.control.http.as_json import json_response
from schedtop.control.http.auth import Caller, Scope
from schedtop.control.http.failures import ApiError
from schedtop.control.http.keys import CALLER
from schedtop.control.http.routes import PREFIX
from schedtop.control.messages import Ack, AnyCommand, KnobsAck, SnapshotReply
from schedtop.control.playbook.events import Progress, RolledBack, RunEvent
from schedtop.control.playbook.foresee import foresee_apart
from schedtop.control.playbook.plan import plan
from schedtop.control.playbook.reader import BadPlaybook, load_playbook, parse_playbook
from schedtop.control.playbook.repeat import keep_running
from schedtop.control.playbook.report import PlannedStep, Report, Result, Settings
from schedtop.control.playbook.schema import Playbook
from schedtop.control.playbook.shipped import find_named, named_playbooks, shipped_playbooks
from schedtop.control.playbook.target import Target
from schedtop.engine.errors import SchedtopError

logger = logging.getLogger(__name__)

RouteSpec = tuple[str, str, Scope, Handler]
MAX_RUNNING = 16
"""Playbooks that may run at once."""
MAX_ENDED = 64
"""Ended runs that are remembered."""
OTHER = "other"
"""The metric's label for a playbook that doesn't come with schedtop: no label is made from what a client sends."""


class StartPlaybook(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a start: `name`, or the file's text as `yaml`. Unless `dry_run` is false nothing is changed.

    `expect_generation`: as the dry run's answer told it; refused if a knob was turned since.
    """

    name: str = ""
    yaml: str = ""
    dry_run: bool = True
    once: bool = False
    expect_generation: int | None = None


class StopPlaybook(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a stop."""

    run_id: int


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One playbook that can be started by name. `fault`: why it can't."""

    name: str
    description: str = ""
    is_shipped: bool = True
    fault: str = ""


class Run(msgspec.Struct, kw_only=True):
    """One run in this gateway."""

    run_id: int
    playbook: str
    started_by: str
    started_wall: float
    is_running: bool = True
    was_stopped: bool = False
    progress: Progress
    reports: list[Report] = []
    """Of the runs that have ended; a playbook with a `when` has many."""
    fault: str = ""
    """Why it ended, if not by a report."""


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a start would do, and the generation it is based on."""

    generation: int
    planned: list[PlannedStep]


class _OnBehalf:
    """A connection whose changes are told in the audit log as those of a token's holder."""

    def __init__(self, client: Client, caller: str) -> None:
        self.welcome = client.welcome
        self.messages = client.messages
        self._client = client
        self._caller = caller

    async def request(self, command: AnyCommand, timeout_s: float | None = 30) -> Ack | KnobsAck | SnapshotReply:
        return await self._client.request(command, timeout_s, on_behalf_of=self._caller)


class PlaybookRoutes:
    """Handlers, and the runs they start. `address`: the engine's control socket."""

    def __init__(self, address: str, registry: CollectorRegistry, folder: Path | None = None) -> None:
        self._address = address
        self._folder = folder
        self._numbers = itertools.count(1)
        self._forecasting = asyncio.Semaphore(1)
        """One dry run at a time: each is seconds of CPU time in a process of its own."""
        self._running: dict[int, tuple[Run, asyncio.Task[None]]] = {}
        self._ended: deque[Run] = deque(maxlen=MAX_ENDED)
        self._shipped = frozenset(path.stem for path in shipped_playbooks())
        self._results = Counter(
            "schedtop_playbook_results", "Ended playbook runs by result and by what became of their changes.",
            ("playbook", "result", "settings"), registry=registry,
        )  # fmt: skip

    def routes(self) -> Iterator[RouteSpec]:
        """Every path of playbooks."""
        yield "GET", f"{PREFIX}/playbooks", Scope.READ, self.list_playbooks
        yield "POST", f"{PREFIX}/playbooks/start", Scope.CONTROL, self.start
        yield "POST", f"{PREFIX}/playbooks/stop", Scope.CONTROL, self.stop
        yield "GET", f"{PREFIX}/playbooks/runs", Scope.READ, self.list_runs
        yield "GET", f"{PREFIX}/playbooks/runs/{{run_id}}", Scope.READ, self.run_status

    # ---- handlers -------------------------------------------------------------------------------------------

    async def list_playbooks(self, request: web.Request) -> web.Response:
        """Playbooks that can be started by name."""
        found = await asyncio.to_thread(lambda: [_listed(*item) for item in named_playbooks(self._folder).items()])
        return json_response({"playbooks": found})

    async def start(self, request: web.Request) -> web.Response:
        """Start a playbook, or with `dry_run` (the default) say what it would do."""
        body = msgspec.json.decode(await request.read() or b"{}", type=StartPlaybook)
        caller: Caller = request[CALLER]
        playbook = await asyncio.to_thread(self._playbook, body)
        if body.dry_run:
            return json_response(await self._dry_run(playbook, caller.name))
        if len(self._running) >= MAX_RUNNING:
            raise ApiError(429, f"{MAX_RUNNING} playbooks are running already: stop one", code="too_many")
        client = await self._connect(playbook)
        try:
            await self._check_generation(client, body.expect_generation)
        except BaseException:
            await client.close()
            raise
        run = self._begin(playbook, client, caller.name, body.once)
        return json_response(run)

    async def stop(self, request: web.Request) -> web.Response:
        """Stop a run; it takes its changes back first."""
        body = msgspec.json.decode(await request.read() or b"{}", type=StopPlaybook)
        found = self._running.get(body.run_id)
        if found is None:
            raise ApiError(404, f"no playbook runs under number {body.run_id}", code="no_such_run", param="run_id")
        run, task = found
        run.was_stopped = True
        task.cancel()
        await asyncio.wait({task})
        return json_response(run)

    async def list_runs(self, request: web.Request) -> web.Response:
        """Runs of this gateway, the newest last; ended ones are remembered for a while."""
        return json_response({"runs": self.runs()})

    async def run_status(self, request: web.Request) -> web.Response:
        """One run as it stands: steps, checks with their values, result."""
        number = request.match_info["run_id"]
        for run in self.runs():
            if str(run.run_id) == number:
                return json_response(run)
        raise ApiError(404, f"there is no run {number[:20]!r} (any more)", code="no_such_run", param="run_id")

    def runs(self) -> list[Run]:
        """Those that run and those remembered."""
        return sorted([*self._ended, *(run for run, _ in self._running.values())], key=lambda run: run.run_id)

    async def close(self) -> None:
        """Stop all runs: each takes its changes back."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ---- runs -----------------------------------------------------------------------------------------------

    def _playbook(self, body: StartPlaybook) -> Playbook:
        if bool(body.name) == bool(body.yaml):
            raise ApiError(400, "give either name or yaml", code="bad_request")
        try:
            if body.yaml:
                return parse_playbook(body.yaml, "yaml")
            return load_playbook(find_named(body.name, self._folder))
        except BadPlaybook as error:
            raise ApiError(400, str(error), code=error.code, param="yaml" if body.yaml else "name") from None

    async def _connect(self, playbook: Playbook) -> Client:
        return await Client.connect(self._address, name=f"playbook {playbook.name}")

    async def _dry_run(self, playbook: Playbook, caller: str) -> DryRun:
        async with self._forecasting, await self._connect(playbook) as client:
            target = Target(_OnBehalf(client, caller))
            planned = await plan(playbook, target, foresee_apart(self._address))
            return DryRun(generation=target.snapshot.generation, planned=planned)

    async def _check_generation(self, client: Client, expected: int | None) -> None:
        generation = (await Target(client).refresh()).generation
        if expected is not None and generation != expected:
            raise ApiError(
                409, f"the dry run was of generation {expected}, the knobs are at {generation}: try it dry again",
                code="conflict", param="expect_generation",
            )  # fmt: skip

    def _begin(self, playbook: Playbook, client: Client, caller: str, once: bool) -> Run:
        run = Run(
            run_id=next(self._numbers),
            playbook=playbook.name,
            started_by=caller,
            started_wall=time.time(),
            progress=Progress.of(playbook),
        )
        task = asyncio.create_task(self._run(run, playbook, client, once), name=f"playbook-{run.run_id}")
        self._running[run.run_id] = run, task
        return run

    async def _run(self, run: Run, playbook: Playbook, client: Client, once: bool) -> None:
        taken_back = Settings.UNCHANGED

        def on_event(event: RunEvent) -> None:
            nonlocal taken_back
            run.progress.take(event)
            if isinstance(event, RolledBack):
                taken_back = event.settings

        def on_report(report: Report) -> None:
            run.reports = [*run.reports[-9:], report]
            self._count(run, report.result.value, report.settings.value)

        try:
            async with client:
                target = Target(_OnBehalf(client, run.started_by), reconnect=lambda: self._connect(playbook))
                run.progress.target = target.name
                await keep_running(playbook, target, once=once, on_event=on_event, on_report=on_report)
        except asyncio.CancelledError:
            run.fault = f"stopped; settings {taken_back}"
            self._count(run, "stopped", taken_back.value)
        except SchedtopError as error:
            run.fault = str(error)
            self._count(run, Result.ERROR.value, Settings.UNKNOWN.value)
        except Exception:
            logger.exception("playbook %s failed by a fault of ours", playbook.name)
            run.fault = "it failed by a fault of the gateway; its log says how"
            self._count(run, Result.ERROR.value, Settings.UNKNOWN.value)
        finally:
            run.is_running = False
            self._running.pop(run.run_id, None)
            self._ended.append(run)

    def _count(self, run: Run, result: str, settings: str) -> None:
        label = run.playbook if run.playbook in self._shipped else OTHER
        self._results.labels(label, result, settings).inc()


def _listed(name: str, path: Path) -> Listed:
    is_shipped = path in shipped_playbooks()
    with contextlib.suppress(BadPlaybook):
        return Listed(name=name, description=load_playbook(path).description.strip(), is_shipped=is_shipped)
    return Listed(name=name, is_shipped=is_shipped, fault="it can't be read: `schedtop play --check` says why")
