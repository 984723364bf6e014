"""A scenario as an engine that can be steered: the engine's own scheduler on a virtual clock, behind the protocol's
commands. Whoever runs a playbook against it runs the very same code as against a live engine, faster than time.

Scheduler, change book and audit log are the real ones; only transport and time are stood in for.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from schedtop import __version__
from schedtop.control.audit import Actor, AuditLog
from schedtop.control.client import CommandRefused, Message
from schedtop.control.commands import Commands
from schedtop.control.messages import (
    Ack,
    AddRequest,
    AnyCommand,
    Drain,
    EndLease,
    EngineInfo,
    GetSnapshot,
    GetStepModel,
    HoldLease,
    SnapshotReply,
    SnapshotUpdate,
    Subscribe,
    Welcome,
)
from schedtop.control.operations import drain_progress
from schedtop.control.playbook.target import INTERVAL_S, Target
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.sim.scenario import Scenario
from schedtop.engine.sim.step_model import StepModelFit
from schedtop.engine.sim.summary import Summary, summarise
from schedtop.engine.snapshot import NO_ROWS, Snapshot, StepRecord, Viewport

MIDNIGHT = 1_767_571_200.0
"""Wall time at which a scenario begins, unless told otherwise: Monday 2026-01-05 00:00 UTC."""
NOT_HERE = (HoldLease, EndLease, AddRequest)
"""Nobody dies in a simulation, and its load is the scenario's."""

T = TypeVar("T")


class SimulatedEngine:
    """Implements `Connection`. Each message that is read lets an interval of virtual time pass."""

    def __init__(
        self, scenario: Scenario, audit: AuditLog, seed: int | None = None, begins_at: float = MIDNIGHT
    ) -> None:
        self.scenario = scenario
        self.simulation = scenario.simulation(seed=seed, watch=lambda _, record: self._watch(record))
        self.core = self.simulation.core
        self.summary: Summary | None = None
        """What clients saw up to the scenario's end; None before it."""
        self.welcome = self._make_welcome()
        self._begins_at = begins_at
        self._records: list[StepRecord] = []
        self._fit = StepModelFit()
        self._commands = Commands(self._call, audit, "simulated", lambda: self.core.next_step)

    def _make_welcome(self) -> Welcome:
        config = self.core.config
        return Welcome(
            protocol=1,
            info=EngineInfo(
                name=self.scenario.name, model="simulated", boot_id="simulated", pid=0, version=__version__,
                block_size=config.block_size, num_usable_blocks=config.num_usable_blocks,
                max_model_len=config.max_model_len, max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
            ),
            knobs=list(self.core.knob_table),
            capabilities=[kind.__name__ for kind in get_args(AnyCommand) if kind not in NOT_HERE],
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        """Whether the scenario has reached its end: its horizon, or nothing left to happen."""
        horizon = self.scenario.horizon_s
        return self.simulation.clock.now >= horizon if horizon is not None else self.simulation.is_over

    async def request(self, command: AnyCommand, timeout_s: float | None = 30) -> Any:
        """Carry a command out at once. Raises `CommandRefused`."""
        match command:
            case GetSnapshot():
                return SnapshotReply(id=1, update=SnapshotUpdate(snapshot=self._snapshot(command.viewport)))
            case Subscribe():
                return Ack(id=1, applied_at_step=self.core.next_step)
            case GetStepModel():
                return Ack(id=1, applied_at_step=self.core.next_step, data={"fitted": self._fit.fitted()})
            case Drain():
                return await self._drain(command)
            case _:
                return await self._carry_out(command)

    async def messages(self) -> AsyncIterator[Message]:
        """Snapshots, an interval of virtual time apart; after the scenario's end time goes on."""
        while True:
            await asyncio.sleep(0)  # whoever waits for us may be cancelled
            self.pass_time(INTERVAL_S)
            records, self._records = self._records, []
            yield SnapshotUpdate(snapshot=self._snapshot(NO_ROWS), steps=records)

    def pass_time(self, seconds: float) -> None:
        """Run the scenario on."""
        clock = self.simulation.clock
        until = clock.now + seconds
        if self.summary is None and self.scenario.horizon_s is not None:
            until = min(until, self.scenario.horizon_s)  # no step begins beyond it that wouldn't without a playbook
        result = self.simulation.run(until)
        clock.jump_to(until)
        if self.is_over and self.summary is None:
            self.summary = summarise(result)

    def finish(self) -> Summary:
        """Run on to the scenario's end, if it isn't over yet."""
        while self.summary is None:
            self.pass_time(INTERVAL_S)
        return self.summary

    def _watch(self, record: StepRecord) -> None:
        self._records.append(record)
        self._fit.add(record)

    def _snapshot(self, viewport: Viewport) -> Snapshot:
        snapshot = self.core.snapshot(viewport)
        return msgspec.structs.replace(snapshot, wall=self._begins_at + self.simulation.clock.now)

    async def _carry_out(self, command: AnyCommand) -> Any:
        try:
            return await self._commands.carry_out(1, command, Actor(uid=None, client="playbook"))
        except SchedtopError as error:
            raise CommandRefused(error.code, str(error)) from None

    async def _drain(self, command: Drain) -> Any:
        """Virtual time passes meanwhile."""
        now = msgspec.structs.replace(command, limit_s=0.0)
        reply = await self._carry_out(now)
        clock = self.simulation.clock
        end = float("inf") if command.limit_s is None else clock.now + command.limit_s
        while (left := drain_progress(self.core)).num_left and not left.stopped and clock.now < end:
            self.pass_time(INTERVAL_S)
            reply = None
        return reply or await self._carry_out(now)

    async def _call(self, operation: Callable[[EngineCore], T]) -> tuple[T, int]:
        return operation(self.core), self.core.next_step

    def close(self) -> None:
        """Release what the engine holds."""
        self._commands.cancel_timers()
        self.core.shutdown()


@contextlib.contextmanager
def simulated(
    scenario: Scenario, seed: int | None = None, begins_at: float = MIDNIGHT
) -> Iterator[tuple[SimulatedEngine, Target]]:
    """A scenario's engine, and it as a target; its audit log is kept while it lives."""
    with tempfile.TemporaryDirectory(prefix="schedtop-") as folder:
        audit = AuditLog(Path(folder) / "audit.sqlite")
        engine = SimulatedEngine(scenario, audit, seed, begins_at)
        try:
            yield engine, Target(engine, name=scenario.name, is_over=lambda: engine.is_over)
        finally:
            engine.close()
            audit.close()
