"""An engine on a virtual clock behind the control protocol's commands: playbooks talk to it in tests, without waiting.

Its scheduler, books and audit log are the real ones; only transport and time are stood in for. No fixtures in here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from schedtop.control.audit import Actor, AuditLog
from schedtop.control.client import CommandRefused, Message
from schedtop.control.commands import Commands
from schedtop.control.messages import (
    Ack,
    AnyCommand,
    EngineInfo,
    GetSnapshot,
    GetStepModel,
    Goodbye,
    SnapshotReply,
    SnapshotUpdate,
    Subscribe,
    Welcome,
)
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.sim.step_model import PAPER_MODEL, StepModelFit
from schedtop.engine.snapshot import StepRecord, Viewport

T = TypeVar("T")
CONFIG = EngineConfig(num_kv_blocks=8001, max_num_batched_tokens=2048, max_num_seqs=64)


class VirtualEngine:
    """Implements what playbooks need of `Client`. Each message that is read lets one interval of virtual time pass.

    `at(seconds, act)` has something happen at a time; `load` requests arrive at once.
    """

    def __init__(self, audit: AuditLog) -> None:
        self.clock = VirtualClock()
        self.core = EngineCore(
            CONFIG, SimulatedRunner(PAPER_MODEL, self.clock.advance), initial_knobs(CONFIG), clock=self.clock
        )
        self.commands = Commands(self._call, audit, "boot", lambda: self.core.next_step)
        self.welcome = Welcome(
            protocol=1,
            info=EngineInfo(name="virtual", model="none", boot_id="boot", pid=1, version="0"),
            knobs=list(self.core.knob_table),
            capabilities=[],
        )
        self.client = "playbook"
        self.is_gone = False
        self._fit = StepModelFit()
        self._interval_s = 0.25
        self._events: list[tuple[float, Callable[[], Any]]] = []
        self._num_requests = 0

    def load(self, count: int, prompt: int = 100, output: int = 5000) -> None:
        """Requests that keep the engine generating."""
        for _ in range(count):
            self._num_requests += 1
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            self.core.add_request(f"r{self._num_requests}", [7] * prompt, sampling)

    def at(self, seconds: float, act: Callable[[], Any]) -> None:
        """Have something happen when the clock passes `seconds`."""
        self._events.append((seconds, act))

    async def request(self, command: AnyCommand, timeout_s: float | None = 30) -> Any:
        """Carry a command out at once."""
        match command:
            case GetSnapshot():
                return SnapshotReply(id=1, update=self._update([], command.viewport))
            case Subscribe():
                assert command.interval_s is not None
                self._interval_s = command.interval_s
                return Ack(id=1, applied_at_step=self.core.next_step)
            case GetStepModel():
                return Ack(id=1, applied_at_step=self.core.next_step, data={"fitted": self._fit.fitted()})
            case _:
                return await self._carry_out(command)

    async def _carry_out(self, command: AnyCommand) -> Any:
        try:
            return await self.commands.carry_out(1, command, Actor(uid=None, client=self.client))
        except SchedtopError as error:
            raise CommandRefused(error.code, str(error)) from None

    async def _call(self, operation: Callable[[EngineCore], T]) -> tuple[T, int]:
        return operation(self.core), self.core.next_step

    async def messages(self) -> AsyncIterator[Message]:
        """Snapshots, an interval of virtual time apart."""
        while not self.is_gone:
            await asyncio.sleep(0)  # a cancelled reader notices
            yield self._update(await self._run_for(self._interval_s), Viewport())
        yield Goodbye(reason="the engine is gone")

    async def _run_for(self, seconds: float) -> list[StepRecord]:
        records, end = [], self.clock.now + seconds
        while self.clock.now < end:
            for moment, act in [event for event in self._events if event[0] <= self.clock.now]:
                self._events.remove((moment, act))
                result = act()
                if result is not None:
                    await result
            outputs = self.core.step() if self.core.has_work else None
            if outputs is not None and outputs.record is not None:
                records.append(outputs.record)
                self._fit.add(outputs.record)
            elif outputs is None:
                self.clock.jump_to(end)
        return records

    def _update(self, records: list[StepRecord], viewport: Viewport) -> SnapshotUpdate:
        return SnapshotUpdate(snapshot=self.core.snapshot(viewport), steps=records)
