"""What watchers get: snapshots at the pace at which each reads, events and step records from shared streams.

The engine is asked for a snapshot only when a watcher wants one and has read the last, once per different viewport;
what several watchers are to get alike is encoded once. Tokens and commands are not here (`server.py`).
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from schedtop.control.changes import ChangeBook
from schedtop.control.connection import Connection, stamped_frame
from schedtop.control.messages import Ack, SnapshotReply, SnapshotUpdate, Subscribe
from schedtop.control.operations import BadCommand, check_viewport
from schedtop.control.streams import EventStream, MissedChanges, StepStream
from schedtop.control.telemetry import Latencies
from schedtop.engine.core import EngineCore
from schedtop.engine.loop import Call
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.sim.step_model import FittedModel, StepModelFit
from schedtop.engine.snapshot import Snapshot, Viewport

EVENT_INTERVAL_S = 0.05
"""While steps run, the events of this long go out together."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.02, 3600.0
"""Between snapshots of one subscription."""
_NUM_TURNS = 997
MAX_STEPS_PER_UPDATE = 1024
"""Step records that go with one snapshot at most: the newest."""


class Engine(Protocol):
    """What the server needs of an engine's thread: `EngineLoop`, or its like inside another engine."""

    outbox: deque[Call | EngineCoreOutputs]
    watcher_parked: bool
    wake_watcher: Callable[[], None]
    failure: BaseException | None
    is_idle: bool

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        ...

    def submit(self, operation: Callable[[EngineCore], Any], tag: Any = None) -> Call:
        """Run something at the next boundary; the call comes back through `outbox`."""
        ...


class Watchers:
    """Serves the connections that have subscribed."""

    def __init__(self, engine: Engine, book: ChangeBook) -> None:
        self.step = -1
        """The newest step heard of."""
        self._engine = engine
        self._subscribers: set[Connection] = set()
        self._book = book
        self._steps = StepStream()
        self._events = EventStream()
        self._events_sent_at = 0.0
        self._latencies = Latencies()
        self._step_model = StepModelFit()
        self._is_shutting_down = False
        self._look_again_at = 0.0
        """No subscription is due before: so a poll costs the same however many there are."""

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Take in what a step or a boundary published."""
        self.step = max(self.step, outputs.step)
        if outputs.record is not None:
            self._steps.add(outputs.record)
            self._latencies.add(outputs.record)
            self._step_model.add(outputs.record)
        if outputs.events:
            self._events.add(outputs.events)

    def step_model(self) -> FittedModel | None:
        """What the steps so far say about how long a step takes."""
        return self._step_model.fitted()

    def place_at_end(self, connection: Connection) -> None:
        """A new connection sees what happens from now on."""
        connection.step_place = connection.asked_place = self._steps.end
        connection.event_place = self._events.end

    def subscribe(self, connection: Connection, number: int, command: Subscribe) -> None:
        """Replace a connection's subscription. Raises `BadCommand`."""
        check_viewport(command.viewport)
        interval = command.interval_s
        if interval is not None and not MIN_INTERVAL_S <= interval <= MAX_INTERVAL_S:
            limits = f"{MIN_INTERVAL_S} to {MAX_INTERVAL_S:g} seconds"
            raise BadCommand(f"interval_s={interval} is outside its range {limits}")
        connection.subscription = command
        self._subscribers.add(connection)
        connection.next_snapshot_at = time.monotonic()
        self.look_again()
        connection.reply(Ack(id=number, applied_at_step=self.step + 1, did="subscribed"))

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        self._subscribers.discard(connection)

    def announce_shutdown(self) -> None:
        """Have every watcher told, at once, that the engine is ending."""
        self._is_shutting_down = True
        for connection in self._subscribers:
            connection.next_snapshot_at = 0.0
        self.look_again()

    def look_again(self) -> None:
        """Somebody may want a snapshot who didn't: a new subscription, a reader that has caught up."""
        self._look_again_at = 0.0

    def next_due(self) -> float | None:
        """When the next snapshot is wanted (mono seconds); None = not until something happens."""
        return min((c.next_snapshot_at for c in self._subscribers if _wants_snapshot(c)), default=None)

    def deliver(self, now: float) -> None:
        """Send the events that are due, and ask the engine for the snapshots that are."""
        if self._engine.is_idle or now - self._events_sent_at >= EVENT_INTERVAL_S:
            self._events_sent_at = now
            frames: dict[int, bytes] = {}
            for connection in list(self._subscribers):
                self._send_events(connection, frames)
        if now >= self._look_again_at:
            self._ask_for_snapshots(now)
            due = self.next_due()
            self._look_again_at = float("inf") if due is None else due

    def _send_events(self, connection: Connection, frames: dict[int, bytes]) -> None:
        """`frames`: what has been encoded in this round, by the place from which it is read."""
        place = connection.event_place
        if place == self._events.end or connection.subscription is None:
            return
        if not connection.subscription.events or not connection.is_ready:
            return
        if place not in frames:
            try:
                batch = self._events.since(place)
            except MissedChanges:
                connection.cut("it fell so far behind that changes to the engine were missed; connect again")
                return
            assert batch is not None
            frames[place] = stamped_frame(batch, self.step)
        connection.event_place = self._events.end
        connection.send_frame(frames[place])

    def _ask_for_snapshots(self, now: float) -> None:
        due: defaultdict[Viewport, list[Connection]] = defaultdict(list)
        for connection in self._subscribers:
            if _wants_snapshot(connection) and connection.next_snapshot_at <= now:
                assert connection.subscription is not None
                connection.awaits_snapshot = True
                connection.next_snapshot_at = _next_turn(connection.subscription, now)
                due[connection.subscription.viewport].append(connection)
        for viewport, connections in due.items():
            self._engine.submit(partial(_snapshot, viewport), partial(self._send_snapshot, connections))

    def _send_snapshot(self, connections: list[Connection], call: Call) -> None:
        self.look_again()
        frames: dict[tuple[int, bool], bytes] = {}
        for connection in connections:
            connection.awaits_snapshot = False
            if call.error is None and connection.subscription is not None and connection.is_ready:
                key = connection.step_place, connection.subscription.steps
                if key not in frames:
                    frames[key] = stamped_frame(self._update(call.result, *key), self.step)
                connection.step_place = self._steps.end
                connection.send_frame(frames[key])

    def reply_with_snapshot(self, connection: Connection, number: int, viewport: Viewport) -> None:
        """Answer `GetSnapshot` at the next boundary. Raises `BadCommand`."""
        check_viewport(viewport)
        self._engine.submit(partial(_snapshot, viewport), partial(self._reply, connection, number))

    def _reply(self, connection: Connection, number: int, call: Call) -> None:
        if call.error is not None:
            connection.refuse(number, call.error)
        else:
            update = self._update(call.result, connection.asked_place, with_steps=False)
            connection.asked_place = self._steps.end
            connection.reply(SnapshotReply(id=number, update=update))

    def _update(self, snapshot: Snapshot, place: int, with_steps: bool) -> SnapshotUpdate:
        """`place`: where the watcher's last snapshot left the step records."""
        return SnapshotUpdate(
            snapshot=snapshot,
            latencies=self._latencies.summary(time.monotonic()),
            steps=self._steps.since(place, MAX_STEPS_PER_UPDATE) if with_steps else [],
            pending_change=self._book.pending_message(),
            shutting_down=self._is_shutting_down,
            peaks=self._steps.peaks_since(place),
        )


def _wants_snapshot(connection: Connection) -> bool:
    subscription = connection.subscription
    return (
        subscription is not None
        and subscription.interval_s is not None
        and not connection.awaits_snapshot
        and connection.is_ready
    )


def _next_turn(subscription: Subscribe, now: float) -> float:
    """When its next snapshot is due: at the same time for all with the same view, who share one, others apart."""
    assert subscription.interval_s is not None
    turn = hash(subscription.viewport) % _NUM_TURNS / _NUM_TURNS * subscription.interval_s
    return now + subscription.interval_s - (now - turn) % subscription.interval_s


def _snapshot(viewport: Viewport, core: EngineCore) -> Snapshot:
    return core.snapshot(viewport)
