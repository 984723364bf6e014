"""What the engine publishes, kept once for all watchers: step records and events, each read from a place of one's own.

A watcher that doesn't read costs nothing here: it only falls behind, and is told so. No sockets, no clients.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from schedtop.control.measures import Peaks
from schedtop.control.messages import EventBatch
from schedtop.engine.snapshot import EngineCoreEvent, EventKind, StepRecord

NUM_STEPS_KEPT = 4096
"""Step records a watcher may be behind before it misses some."""
NUM_EVENTS_KEPT = 16_384
"""Events a watcher may be behind before it misses some that only concern single requests."""
NUM_CHANGES_KEPT = 1024
"""Changes an operator made (knobs, priorities, pauses) a watcher may be behind; past it, it is cut."""
OPERATOR_KINDS = frozenset(
    {
        EventKind.KNOBS_CHANGED,
        EventKind.PRIORITY_CHANGED,
        EventKind.PAUSED,
        EventKind.UNPAUSED,
        EventKind.CACHE_RESET,
    }
)
"""Events that are never dropped."""


class StepStream:
    """The newest step records, numbered by order of arrival."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=NUM_STEPS_KEPT)
        self.end = 0
        """Place after the newest record."""

    def add(self, record: StepRecord) -> None:
        """Append the record of a finished step."""
        self._records.append(record)
        self.end += 1

    def since(self, place: int, limit: int) -> list[StepRecord]:
        """The newest records from `place` on, at most `limit`."""
        count = min(self.end - place, limit, len(self._records))
        return list(islice(self._records, len(self._records) - count, None))

    def peaks_since(self, place: int) -> Peaks | None:
        """The largest values of the records from `place` on, as far as they are kept; None if there are none."""
        if not (records := self.since(place, NUM_STEPS_KEPT)):
            return None
        return Peaks(
            num_steps=len(records),
            running=max(record.num_running for record in records),
            waiting=max(record.num_waiting for record in records),
            blocks_in_use=max(record.blocks_in_use for record in records),
        )


class MissedChanges(Exception):
    """A watcher fell so far behind that an operator's change is lost to it."""


class EventStream:
    """The newest events; operators' changes among them are kept longer than the rest."""

    def __init__(self) -> None:
        self._events: deque[EngineCoreEvent] = deque(maxlen=NUM_EVENTS_KEPT)
        self._changes: deque[EngineCoreEvent] = deque(maxlen=NUM_CHANGES_KEPT)
        self._lost_change = 0
        """Sequence number of the newest change that is kept no more."""
        self.end = 0
        """Sequence number of the newest event."""

    def add(self, events: Iterable[EngineCoreEvent]) -> None:
        """Append what happened."""
        for event in events:
            self._events.append(event)
            self.end = event.sequence
            if event.kind in OPERATOR_KINDS:
                if len(self._changes) == NUM_CHANGES_KEPT:
                    self._lost_change = self._changes[0].sequence
                self._changes.append(event)

    def since(self, sequence: int) -> EventBatch | None:
        """Everything after event number `sequence`; None if there is nothing.

        Of what is kept no more, changes are still delivered and the others counted. Raises `MissedChanges`.
        """
        if self.end <= sequence:
            return None
        num_new = min(self.end - sequence, len(self._events))
        events = list(islice(self._events, len(self._events) - num_new, None))
        gap_end = events[0].sequence
        if gap_end == sequence + 1:
            return EventBatch(events=events)
        if self._lost_change > sequence:
            raise MissedChanges
        late = [change for change in self._changes if sequence < change.sequence < gap_end]
        return EventBatch(events=late + events, dropped=gap_end - sequence - 1 - len(late))
