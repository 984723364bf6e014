"""What playbooks ask of an engine, over the one control protocol. `Client` is such a connection; tests have another."""

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from schedtop.control.client import Message
from schedtop.control.messages import (
    Ack,
    AnyCommand,
    GetSnapshot,
    GetStepModel,
    KnobsAck,
    SetKnobs,
    SnapshotReply,
    Welcome,
)
from schedtop.engine.sim.step_model import FittedModel
from schedtop.engine.snapshot import Snapshot, Viewport

NO_ROWS = Viewport(running_rows=0, waiting_rows=0)


class Connection(Protocol):
    """The part of `Client` that playbooks use."""

    welcome: Welcome

    async def request(self, command: AnyCommand, timeout_s: float | None = 30) -> Ack | KnobsAck | SnapshotReply:
        """Send a command and wait for its reply."""
        ...

    def messages(self) -> AsyncIterator[Message]:
        """What the engine publishes."""
        ...


async def take_snapshot(engine: Connection) -> Snapshot:
    """The engine now, without rows."""
    reply = await engine.request(GetSnapshot(viewport=NO_ROWS))
    assert isinstance(reply, SnapshotReply)
    return reply.update.snapshot


async def set_knobs(engine: Connection, command: SetKnobs) -> KnobsAck:
    """Change knobs and return the receipt. Raises `CommandRefused`."""
    receipt = await engine.request(command)
    assert isinstance(receipt, KnobsAck)
    return receipt


async def step_model(engine: Connection) -> FittedModel | None:
    """The fitted step-time model, None before there is one."""
    ack = await engine.request(GetStepModel())
    assert isinstance(ack, Ack)
    return msgspec.convert(ack.data["fitted"], FittedModel | None)
