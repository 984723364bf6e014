"""A recording as an engine that can be watched and asked, but not changed: what it shows is over."""

from collections.abc import AsyncIterator
from typing import Any

from schedtop.control.client import CommandRefused, Message
from schedtop.control.messages import (
    Ack,
    AnyCommand,
    GetSnapshot,
    GetStepModel,
    Goodbye,
    KnobsAck,
    SetKnobs,
    SnapshotReply,
    SnapshotUpdate,
    Subscribe,
    Welcome,
)
from schedtop.control.recorder import BadRecording, Recording
from schedtop.engine.errors import KnobRefused
from schedtop.engine.knobs import KNOB_NAMES, change_knobs
from schedtop.engine.sim.step_model import StepModelFit


class RecordedEngine:
    """Implements `Connection`; each message that is read moves the recorded time on."""

    def __init__(self, recording: Recording) -> None:
        """Raises `BadRecording` for one without a single snapshot."""
        self._messages = recording.read()
        self._fit = StepModelFit()
        welcome, self._latest = self._read_beginning(recording)
        self.welcome: Welcome = welcome

    def _read_beginning(self, recording: Recording) -> tuple[Welcome, SnapshotUpdate]:
        welcome: Welcome | None = None
        for entry in self._messages:
            match entry.message:
                case Welcome():
                    welcome = entry.message
                case SnapshotUpdate() if welcome is not None:
                    self._learn(entry.message)
                    return welcome, entry.message
        raise BadRecording(f"{recording.path} holds no snapshot: there is nothing to try a playbook on")

    async def request(self, command: AnyCommand, timeout_s: float | None = 30) -> Any:
        """Answer what a recording can. Raises `CommandRefused`."""
        step = self._latest.snapshot.step
        match command:
            case GetSnapshot():
                return SnapshotReply(id=1, update=self._latest)
            case Subscribe():
                return Ack(id=1, applied_at_step=step)
            case GetStepModel():
                return Ack(id=1, applied_at_step=step, data={"fitted": self._fit.fitted()})
            case SetKnobs(dry_run=True):
                return self._check(command)
            case _:
                raise CommandRefused("recording", f"a recording can't carry out {type(command).__name__}: it is over")

    def _check(self, command: SetKnobs) -> KnobsAck:
        knobs = self._latest.snapshot.knobs
        try:
            changed = change_knobs(knobs, command.changes, tuple(self.welcome.knobs))
        except KnobRefused as error:
            raise CommandRefused(error.code, str(error)) from None
        names = [name for name in KNOB_NAMES if name in command.changes]
        return KnobsAck(
            id=1, applied_at_step=self._latest.snapshot.step, change_id=0, generation=self._latest.snapshot.generation,
            before={name: getattr(knobs, name) for name in names},
            after={name: getattr(changed, name) for name in names}, dry_run=True,
        )  # fmt: skip

    async def messages(self) -> AsyncIterator[Message]:
        """The recorded snapshots, up to the end of the recording or of the engine in it."""
        yield self._latest
        for entry in self._messages:
            match entry.message:
                case SnapshotUpdate():
                    self._latest = entry.message
                    self._learn(entry.message)
                    yield entry.message
                case Goodbye():
                    break
        yield Goodbye(reason="the recording is over")

    def _learn(self, update: SnapshotUpdate) -> None:
        for record in update.steps:
            self._fit.add(record)
