"""Leases: what was changed under one is taken back unless its holder keeps saying that it lives.

Commit-confirmed for somebody who means to stay: a playbook's runner holds one lease for all it does and renews it while
it lives. Bookkeeping and the clock; undoing is `commands.py`'s.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from schedtop.control.changes import MAX_CONFIRM_S
from schedtop.control.messages import Drain, HoldLease, Pause, Resume, SetKnobs, UndoChange
from schedtop.control.operations import BadCommand
from schedtop.engine.errors import SchedtopError

MAX_LEASES = 256
MAX_ID_LENGTH = 64

Undo = UndoChange | Resume


class UnknownLease(SchedtopError):
    """A lease that was never begun, has ended, or has run out."""

    code = "unknown_lease"


class Lease(msgspec.Struct, kw_only=True):
    """One holder's promise to come back."""

    lease_id: str
    within_s: float
    expires_at: float
    """Mono time."""
    undo: list[Undo] = []
    """What takes back what was done under it, in the order it was done."""
    is_over: bool = False


class Leases:
    """All leases in force. `run_out(lease)` is called, and awaited, when one wasn't renewed in time."""

    def __init__(self, run_out: Callable[[Lease], Awaitable[None]]) -> None:
        self._run_out = run_out
        self._leases: dict[str, Lease] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._late: set[asyncio.Task[None]] = set()

    def hold(self, command: HoldLease) -> tuple[Lease, bool]:
        """Begin or renew; returns the lease and whether it is new. Raises `BadCommand`."""
        _check(command)
        expires_at = time.monotonic() + command.within_s
        lease = self._leases.get(command.lease_id)
        if lease is not None:
            lease.within_s, lease.expires_at = command.within_s, expires_at
            return lease, False
        if len(self._leases) >= MAX_LEASES:
            raise BadCommand(f"{MAX_LEASES} leases are in force, which is the limit; end one first")
        lease = Lease(lease_id=command.lease_id, within_s=command.within_s, expires_at=expires_at)
        self._leases[lease.lease_id] = lease
        self._tasks[lease.lease_id] = asyncio.create_task(self._watch(lease))
        return lease, True

    def get(self, lease_id: str) -> Lease:
        """The lease in force of that name. Raises `UnknownLease`."""
        if (lease := self._leases.get(lease_id)) is None:
            raise UnknownLease(f"no lease {lease_id!r} is in force: it ran out, has ended, or was never begun")
        return lease

    def of(self, command: SetKnobs | Pause | Drain) -> Lease | None:
        """The lease that a command is given under; None where it names none. Raises `UnknownLease`."""
        return self.get(command.lease_id) if command.lease_id else None

    def put(self, lease: Lease, undo: Undo) -> None:
        """Have something taken back with the lease; at once if it ran out while the change was being made."""
        lease.undo.append(undo)
        if lease.is_over:
            task = asyncio.ensure_future(self._run_out(lease))
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    def end(self, lease_id: str) -> Lease:
        """Keep what was done under it. Raises `UnknownLease`."""
        lease = self.get(lease_id)
        self._tasks.pop(lease_id).cancel()
        del self._leases[lease_id]
        lease.is_over = True
        return lease

    def cancel(self) -> None:
        """The engine is ending."""
        for task in self._tasks.values():
            task.cancel()

    async def _watch(self, lease: Lease) -> None:
        while (left := lease.expires_at - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
        del self._leases[lease.lease_id], self._tasks[lease.lease_id]
        lease.is_over = True
        await self._run_out(lease)


def _check(command: HoldLease) -> None:
    if not 0 < len(command.lease_id) <= MAX_ID_LENGTH or not command.lease_id.isprintable():
        raise BadCommand(f"lease_id={command.lease_id!r} is no name: give 1 to {MAX_ID_LENGTH} printable characters")
    if not 0 < command.within_s <= MAX_CONFIRM_S:
        raise BadCommand(
            f"within_s={command.within_s} is outside its range: above 0, at most {MAX_CONFIRM_S:g} seconds"
        )
