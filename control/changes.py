"""The book of knob changes since start: what can be confirmed, undone, or stands in the way. Pure data and rules.

It only knows what was applied; applying is the engine's part (`commands.py` brings both together).
"""

from enum import StrEnum

import msgspec

from schedtop.control.audit import Actor
from schedtop.control.messages import PendingChange
from schedtop.engine.errors import Conflict, SchedtopError
from schedtop.engine.knobs import KnobValue

NUM_CHANGES_KEPT = 1000
"""Changes that can still be undone by number."""
MAX_CONFIRM_S = 24 * 3600.0


class UnknownChange(SchedtopError):
    """A change number that isn't in the book, or can't be confirmed or undone any more."""

    code = "unknown_change"


class ChangeState(StrEnum):
    """What became of a change."""

    KEPT = "kept"
    PENDING = "pending"
    """Waits for its confirmation."""
    ROLLING_BACK = "rolling back"
    UNDONE = "undone"


class Change(msgspec.Struct, kw_only=True):
    """One applied change set."""

    change_id: int
    generation: int
    """The engine's generation with this change."""
    before: dict[str, KnobValue]
    after: dict[str, KnobValue]
    actor: Actor
    reason: str = ""
    state: ChangeState = ChangeState.KEPT
    undoes: int | None = None
    """The change this one rolled back."""
    rolls_back_at: float | None = None
    """Mono time at which it is undone unless confirmed."""

    @property
    def is_waiting(self) -> bool:
        """Whether its confirmation, or its roll-back, is still to come."""
        return self.state in (ChangeState.PENDING, ChangeState.ROLLING_BACK)

    def __str__(self) -> str:
        values = ", ".join(f"{name} {self.before[name]} -> {value}" for name, value in self.after.items())
        return f"change {self.change_id} by {self.actor}: {values}" + (f" ({self.reason})" if self.reason else "")


class ChangeBook:
    """All changes since start, the newest last."""

    def __init__(self) -> None:
        self._changes: dict[int, Change] = {}
        self._num_changes = 0

    def add(self, change: Change) -> Change:
        """Enter a change; its number is given here."""
        self._num_changes += 1
        change.change_id = self._num_changes
        self._changes[change.change_id] = change
        if len(self._changes) > NUM_CHANGES_KEPT:
            del self._changes[next(number for number, old in self._changes.items() if not old.is_waiting)]
        if change.undoes is not None and (undone := self._changes.get(change.undoes)):
            undone.state, undone.rolls_back_at = ChangeState.UNDONE, None
        return change

    @property
    def pending(self) -> Change | None:
        """The change that waits for its confirmation: one at a time."""
        return next((change for change in self._changes.values() if change.is_waiting), None)

    def pending_message(self) -> PendingChange | None:
        """The pending change as watchers see it."""
        change = self.pending
        if change is None or change.rolls_back_at is None:
            return None
        return PendingChange(
            change_id=change.change_id,
            changes={name: (change.before[name], value) for name, value in change.after.items()},
            rolls_back_at_mono=change.rolls_back_at,
            actor=str(change.actor),
        )

    def check_free(self, names: set[str], wants_confirmation: bool) -> None:
        """Raise `Conflict` if a pending change stands in the way of changing `names`."""
        pending = self.pending
        if pending is None:
            return
        shared = sorted(names & set(pending.after))
        if shared or wants_confirmation:
            what = f"{', '.join(shared)} belongs to" if shared else "only one change may wait for confirmation:"
            raise Conflict(f"{what} {pending}; confirm or undo it first")

    def confirmable(self, change_id: int) -> Change:
        """The pending change of that number; raises `UnknownChange`."""
        change = self._changes.get(change_id)
        if change is None:
            raise UnknownChange(f"there is no change {change_id} since this engine's start")
        if change.state is not ChangeState.PENDING:
            raise UnknownChange(f"{change} waits for no confirmation: it is {change.state}")
        return change

    def undoable(self, change_id: int | None) -> Change:
        """The change of that number, or the last one made and not undone; raises `UnknownChange`."""
        if change_id is None:
            kept = [c for c in self._changes.values() if c.undoes is None and c.state is not ChangeState.UNDONE]
            if not kept:
                raise UnknownChange("there is nothing to undo since this engine's start")
            return kept[-1]
        change = self._changes.get(change_id)
        if change is None:
            raise UnknownChange(f"there is no change {change_id} since this engine's start")
        if change.state is ChangeState.UNDONE:
            raise UnknownChange(f"{change} is undone already")
        return change

    def is_undone(self, change_id: int | None) -> bool:
        """Whether there is nothing left of that change to undo."""
        change = self._changes.get(change_id) if change_id is not None else None
        return change is None or change.state is ChangeState.UNDONE

    def since(self, generation: int) -> list[Change]:
        """Changes newer than a generation: what a stale change conflicts with."""
        return [change for change in self._changes.values() if change.generation > generation]

    def last_of(self, name: str) -> Change | None:
        """The newest change of a knob."""
        return next((change for change in reversed(self._changes.values()) if name in change.after), None)
