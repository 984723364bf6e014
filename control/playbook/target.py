"""One engine as playbooks and the autopilot see it: its signals over time, its knobs, and ways to change and undo.

Over a `Connection`, which may lead to a live engine (`Client`), to a scenario on a virtual clock (`simulated.py`) or to
a recording (`recorded.py`): whoever acts through a target never knows which. No playbook in here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import msgspec

from schedtop.control.client import Message
from schedtop.control.errors import Disconnected
from schedtop.control.messages import (
    Ack,
    AnyCommand,
    GetAudit,
    GetSnapshot,
    GetState,
    GetStepModel,
    Goodbye,
    KnobsAck,
    SetKnobs,
    SnapshotReply,
    SnapshotUpdate,
    Subscribe,
    Welcome,
)
from schedtop.control.playbook.signals import KEPT_S, SignalHistory
from schedtop.engine.knobs import KnobSpec, KnobValue
from schedtop.engine.sim.state import EngineState
from schedtop.engine.sim.step_model import FittedModel
from schedtop.engine.snapshot import NO_ROWS, Snapshot

INTERVAL_S = 0.25
"""Between snapshots."""
SILENCE_S = 30.0
"""Without a snapshot for so long the engine counts as hanging."""


class Connection(Protocol):
    """The part of `Client` that a target uses."""

    welcome: Welcome

    async def request(self, command: AnyCommand, timeout_s: float | None = 30) -> Ack | KnobsAck | SnapshotReply:
        """Send a command and wait for its reply. Raises `SchedtopError`."""
        ...

    def messages(self) -> AsyncIterator[Message]:
        """What the engine publishes."""
        ...


Reconnect = Callable[[], Awaitable[Connection]]
Listener = Callable[[SnapshotUpdate], None]


class Watching:
    """A history that takes in what happens from some engine step on."""

    def __init__(self, kept_s: float, from_step: int) -> None:
        self.history = SignalHistory(kept_s)
        self._from_step = from_step

    def take(self, update: SnapshotUpdate) -> None:
        """A moment."""
        self.history.add_steps(record for record in update.steps if record.step >= self._from_step)
        self.history.add_snapshot(update.snapshot)


class Target:
    """An engine. Call `begin` first; then time passes with each `next_moment`.

    Methods raise `SchedtopError`: `CommandRefused` when the engine refuses, `Disconnected` when it is gone.
    """

    def __init__(
        self,
        engine: Connection,
        *,
        name: str = "",
        kept_s: float = KEPT_S,
        reconnect: Reconnect | None = None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self.engine = engine
        self.name = name or engine.welcome.info.name
        self.history = SignalHistory(kept_s)
        self.snapshot: Snapshot
        self.is_live = is_over is None
        """Whether it is a running engine, whose end never comes by itself."""
        self.is_over = is_over or (lambda: False)
        """Whether nothing more will happen: the end of a scenario."""
        self._listeners: list[Listener] = []
        self._reconnect = reconnect
        self._updates: AsyncIterator[Message] | None = None

    # ---- time and signals -----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The engine's clock, in seconds."""
        return self.history.now

    @property
    def specs(self) -> dict[str, KnobSpec]:
        """The knobs with this engine's ceilings."""
        return {spec.name: spec for spec in self.engine.welcome.knobs}

    async def begin(self) -> None:
        """Subscribe and take in the first moment; once."""
        if self._updates is None:
            self._updates = self.engine.messages()
            await self.engine.request(Subscribe(interval_s=INTERVAL_S, viewport=NO_ROWS, events=False))
            await self.next_moment()

    async def next_moment(self) -> Snapshot:
        """Wait for the next snapshot and tell all listeners; what one of them raises comes out here."""
        assert self._updates is not None, "begin first"
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await anext(self._updates)
            except TimeoutError:
                raise Disconnected(f"no snapshot for {SILENCE_S:g} s: the engine hangs") from None
            except StopAsyncIteration:
                raise Disconnected("the connection has ended") from None
            match message:
                case SnapshotUpdate():
                    self._take(message)
                    return self.snapshot
                case Goodbye():
                    raise Disconnected(message.reason)

    def _take(self, update: SnapshotUpdate) -> None:
        self.snapshot = update.snapshot
        self.history.add_steps(update.steps)
        self.history.add_snapshot(update.snapshot)
        for listener in list(self._listeners):
            listener(update)

    async def wait_until(self, mono: float) -> None:
        """Let time pass."""
        while self.now < mono:
            await self.next_moment()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have every moment told; returns how to end that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def recover(self) -> None:
        """After `Disconnected`: connect anew. Raises `Disconnected` if that fails or another engine answers."""
        if self._reconnect is None:
            raise Disconnected("the connection is gone")
        boot_id = self.engine.welcome.info.boot_id
        self.engine = await self._reconnect()
        if self.engine.welcome.info.boot_id != boot_id:
            raise Disconnected("the engine was started anew: its live changes are lost")
        self._updates = None
        await self.begin()

    # ---- knobs and commands ---------------------------------------------------------------------------------

    async def refresh(self) -> Snapshot:
        """The engine at this moment, without letting time pass."""
        reply = await self.request(GetSnapshot(viewport=NO_ROWS))
        assert isinstance(reply, SnapshotReply)
        self.snapshot = reply.update.snapshot
        return self.snapshot

    async def set_knobs(self, command: SetKnobs) -> KnobsAck:
        """Change knobs (or only check a change) and return the receipt."""
        receipt = await self.request(command)
        assert isinstance(receipt, KnobsAck)
        return receipt

    async def request(self, command: AnyCommand, timeout_s: float | None = 30) -> Ack | KnobsAck | SnapshotReply:
        """Any command."""
        return await self.engine.request(command, timeout_s)

    def can(self, command: type) -> bool:
        """Whether this engine takes a command."""
        return command.__name__ in self.engine.welcome.capabilities

    # ---- questions ------------------------------------------------------------------------------------------

    async def step_model(self) -> FittedModel | None:
        """The fitted step-time model, None before there is one."""
        return msgspec.convert((await self._ask(GetStepModel()))["fitted"], FittedModel | None)

    async def state(self) -> EngineState:
        """The whole scheduling state: what a forecast starts from."""
        return msgspec.convert((await self._ask(GetState()))["state"], EngineState)

    async def audit(self, limit: int) -> list[dict[str, Any]]:
        """The newest rows of the audit log, newest first."""
        rows: list[dict[str, Any]] = (await self._ask(GetAudit(limit=limit)))["rows"]
        return rows

    async def _ask(self, question: AnyCommand) -> dict[str, Any]:
        ack = await self.request(question)
        assert isinstance(ack, Ack)
        return ack.data


def knob_values(snapshot: Snapshot) -> dict[str, KnobValue]:
    """All knobs by name, as the wire writes them."""
    values: dict[str, KnobValue] = msgspec.to_builtins(snapshot.knobs)
    return values
