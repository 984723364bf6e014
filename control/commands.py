"""Carries out commands one by one: checks, engine call, book of changes, audit row, reply. In that order, always.

A row is on disk before the reply is returned. Roll-backs of unconfirmed changes happen here too, whoever is still
connected. No sockets and no encoding; what an operation does inside the engine is in `operations.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from schedtop.control.audit import Actor, AuditFailed, AuditLog, AuditRow
from schedtop.control.changes import MAX_CONFIRM_S, Change, ChangeBook, ChangeState, UnknownChange
from schedtop.control.leases import Lease, Leases
from schedtop.control.messages import (
    Ack,
    AddRequest,
    AnyCommand,
    ConfirmChange,
    Drain,
    DumpSteps,
    EndLease,
    GetAudit,
    GetInfo,
    GetSnapshot,
    GetState,
    GetStepModel,
    HoldLease,
    KnobsAck,
    NoteRefusal,
    Pause,
    Reply,
    Resume,
    SelfCheck,
    SetKnobs,
    Subscribe,
    UndoChange,
)
from schedtop.control.operations import BadCommand, check_range, drain_progress, operation_for, start_drain
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import Conflict, SchedtopError
from schedtop.engine.outputs import KnobChange
from schedtop.engine.snapshot import PauseState

MAX_REASON = 500
"""Longest reason, in characters."""
MAX_AUDIT_ROWS = 10_000
DRAIN_POLL_S = 0.02
_STAYS = "nobody new is admitted until resume"
SERVER = Actor(uid=None, client="schedtop")
_UNAUDITED = (
    Subscribe, GetSnapshot, GetInfo, AddRequest, SelfCheck, DumpSteps, GetStepModel, GetState, GetAudit,
)  # fmt: skip
"""What only asks, and what is traffic."""

T = TypeVar("T")


class CallEngine(Protocol):
    """Runs something at the next step boundary."""

    async def __call__(self, operation: Callable[[EngineCore], T]) -> tuple[T, int]:
        """Returns its result and the first step that sees the effect; raises what it raised."""
        ...


class Commands:
    """Everything a client may ask of the engine, except to watch it and to submit requests."""

    def __init__(self, call: CallEngine, audit: AuditLog, boot_id: str, step_now: Callable[[], int]) -> None:
        self.book = ChangeBook()
        self._leases = Leases(self._run_out)
        self._paused_by = ""
        """The lease whose pause is in force; "" for anybody else's."""
        self._call = call
        self._audit = audit
        self._boot_id = boot_id
        self._step_now = step_now
        self._knob_lock = asyncio.Lock()
        """One knob change at a time, from its checks to its entry in the book."""
        self._timers: dict[int, asyncio.Task[None]] = {}

    async def carry_out(
        self,
        number: int,
        command: AnyCommand,
        actor: Actor,
        is_own: bool = False,
        why_not: SchedtopError | None = None,
    ) -> Reply:
        """The reply to envelope `number`. Raises `SchedtopError` for a refusal, which is in the audit log by then.

        `is_own`: the client only withdraws requests it submitted itself, which is no business of the audit log.
        `why_not`: it has been refused already, and is only to be recorded as such.
        """
        try:
            if why_not is not None:
                raise why_not
            check_reason(command)
            if is_own:
                return await self._operate(number, command, actor, is_audited=False)
            return await self._dispatch(number, command, actor)
        except AuditFailed:
            raise
        except SchedtopError as error:
            if not isinstance(command, _UNAUDITED) and not getattr(command, "dry_run", False):
                await self._log(command, actor, self._step_now(), "refused", str(error))
            raise

    async def _dispatch(self, number: int, command: AnyCommand, actor: Actor) -> Reply:
        match command:
            case SetKnobs():
                return await self._set_knobs(number, command, actor)
            case ConfirmChange():
                return await self._confirm(number, command, actor)
            case UndoChange():
                return await self._undo(number, command, actor)
            case HoldLease():
                return await self._hold_lease(number, command, actor)
            case EndLease():
                return await self._end_lease(number, command, actor)
            case Drain():
                return await self._drain(number, command, actor)
            case GetAudit():
                check_range("limit", command.limit, 1, MAX_AUDIT_ROWS)
                rows = await asyncio.wrap_future(self._audit.newest(command.limit))
                return Ack(id=number, applied_at_step=self._step_now(), data={"rows": rows})
            case NoteRefusal():
                await self._log(command, actor, self._step_now(), "refused", command.detail, action=command.action)
                return Ack(id=number, applied_at_step=self._step_now(), did="noted")
            case _:
                return await self._operate(number, command, actor, is_audited=not isinstance(command, _UNAUDITED))

    async def _operate(self, number: int, command: AnyCommand, actor: Actor, is_audited: bool) -> Ack:
        operation = operation_for(command)
        assert operation is not None, f"nobody carries out {type(command).__name__}"
        lease = self._leases.of(command) if isinstance(command, Pause) else None
        outcome, step = await self._call(operation)
        if isinstance(command, Pause | Resume):
            self._note_pause(lease, outcome.before == PauseState.RUNNING)
        if is_audited:
            await self._log(command, actor, step, "done", outcome.did, before=outcome.before, after=outcome.after)
        return Ack(
            id=number,
            applied_at_step=step,
            found=outcome.found,
            did=outcome.did,
            touched=outcome.touched,
            data=outcome.data,
        )

    async def _drain(self, number: int, command: Drain, actor: Actor) -> Ack:
        if command.limit_s is not None and not 0 <= command.limit_s <= MAX_CONFIRM_S:
            raise BadCommand(f"limit_s={command.limit_s} is outside its range 0 to {MAX_CONFIRM_S:g} seconds")
        lease = self._leases.of(command)
        outcome, step = await self._call(start_drain)
        self._note_pause(lease, outcome.before == PauseState.RUNNING)
        num_left, why = await self.wait_drained(outcome.data["left"], command.limit_s)
        did = f"not drained, {num_left} left: {why}" if num_left else f"drained: nothing is under way; {_STAYS}"
        await self._log(command, actor, step, "done", did, before=outcome.before, after={"left": num_left})
        data = {"drained": not num_left, "left": num_left}
        return Ack(id=number, applied_at_step=step, found=outcome.found, did=did, data=data)

    async def wait_drained(self, num_left: int, limit_s: float | None) -> tuple[int, str]:
        """Wait until a drain that was started is done or can't go on: requests left, and why."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while num_left:
            if deadline is not None and time.monotonic() >= deadline:
                return num_left, f"the limit of {limit_s:g} s has passed; {_STAYS}"
            await asyncio.sleep(DRAIN_POLL_S)
            progress, _ = await self._call(drain_progress)
            num_left = progress.num_left
            if num_left and progress.stopped:
                return num_left, progress.stopped
        return 0, ""

    # ---- knobs ----------------------------------------------------------------------------------------------

    async def _set_knobs(self, number: int, command: SetKnobs, actor: Actor) -> KnobsAck:
        _check_change(command)
        lease = self._leases.of(command)
        async with self._knob_lock:
            self.book.check_free(set(command.changes), command.confirm_within_s is not None)
            receipt, step = await self._try_knobs(command)
            change = None
            if not command.dry_run and receipt.before != receipt.after:
                change = self._enter(receipt, actor, command.reason)
                if command.confirm_within_s is not None:
                    self._await_confirmation(change, command.confirm_within_s)
                if lease is not None:
                    self._leases.put(lease, UndoChange(change_id=change.change_id, reason=_why_undone(lease)))
        ack = _knobs_ack(number, step, receipt, change, command.dry_run)
        if not command.dry_run:
            await self._log_change(command, actor, step, receipt, change)
        return ack

    async def _try_knobs(self, command: SetKnobs) -> tuple[KnobChange, int]:
        try:
            return await self._call(
                lambda core: core.set_knobs(command.changes, command.expect_generation, command.dry_run)
            )
        except Conflict as error:
            newer = self.book.since(command.expect_generation if command.expect_generation is not None else 0)
            raise Conflict("; ".join([str(error), *map(str, newer[-5:])])) from None

    def _enter(self, receipt: KnobChange, actor: Actor, reason: str, undoes: int | None = None) -> Change:
        changed = [name for name in receipt.after if receipt.before[name] != receipt.after[name]]
        return self.book.add(
            Change(
                change_id=0,
                generation=receipt.generation,
                before={name: receipt.before[name] for name in changed},
                after={name: receipt.after[name] for name in changed},
                actor=actor,
                reason=reason,
                undoes=undoes,
            )
        )

    def _await_confirmation(self, change: Change, within_s: float) -> None:
        change.state = ChangeState.PENDING
        change.rolls_back_at = time.monotonic() + within_s
        self._timers[change.change_id] = asyncio.create_task(self._roll_back_after(change, within_s))

    async def _roll_back_after(self, change: Change, within_s: float) -> None:
        await asyncio.sleep(within_s)
        del self._timers[change.change_id]
        if change.state is not ChangeState.PENDING:
            return
        change.state = ChangeState.ROLLING_BACK
        command = UndoChange(change_id=change.change_id, reason=f"not confirmed within {within_s:g} s")
        try:
            receipt, step, undoing = await self._undo_in_engine(change, SERVER, command.reason)
        except UnknownChange:
            return  # an operator's undo was quicker
        except SchedtopError as error:
            change.state, change.rolls_back_at = ChangeState.KEPT, None
            await self._log(command, SERVER, self._step_now(), "failed", str(error), action="RollBack")
            return
        await self._log_change(command, SERVER, step, receipt, undoing, "RollBack", "rolled back")

    async def _confirm(self, number: int, command: ConfirmChange, actor: Actor) -> Ack:
        change = self.book.confirmable(command.change_id)
        change.state, change.rolls_back_at = ChangeState.KEPT, None
        self._timers.pop(change.change_id).cancel()
        await self._log(command, actor, self._step_now(), "done", f"kept {change}", change_id=change.change_id)
        return Ack(id=number, applied_at_step=self._step_now(), found="waiting for confirmation", did=f"kept {change}")

    async def _undo(self, number: int, command: UndoChange, actor: Actor) -> KnobsAck:
        change = self.book.undoable(command.change_id)
        pending = self.book.pending
        if pending is not None and pending is not change:
            self.book.check_free(set(change.after), wants_confirmation=False)
        receipt, step, undoing = await self._undo_in_engine(change, actor, command.reason)
        if timer := self._timers.pop(change.change_id, None):
            timer.cancel()
        await self._log_change(command, actor, step, receipt, undoing)
        return _knobs_ack(number, step, receipt, undoing, dry_run=False)

    async def _undo_in_engine(self, change: Change, actor: Actor, reason: str) -> tuple[KnobChange, int, Change]:
        async with self._knob_lock:
            self.book.undoable(change.change_id)  # it may have been undone while we waited for the lock
            receipt, step = await self._call(lambda core: undo(core, change, self.book))
            return receipt, step, self._enter(receipt, actor, reason, undoes=change.change_id)

    # ---- leases ---------------------------------------------------------------------------------------------

    async def _hold_lease(self, number: int, command: HoldLease, actor: Actor) -> Ack:
        """Only the beginning is a row of the audit log: a runner renews every few seconds."""
        lease, is_new = self._leases.hold(command)
        did = f"{'began' if is_new else 'renewed'} lease {lease.lease_id}, {lease.within_s:g} s"
        if is_new:
            await self._log(command, actor, self._step_now(), "done", did)
        return Ack(id=number, applied_at_step=self._step_now(), did=did, data={"is_new": is_new})

    async def _end_lease(self, number: int, command: EndLease, actor: Actor) -> Ack:
        lease = self._leases.end(command.lease_id)
        num_left = sum(not (isinstance(u, UndoChange) and self.book.is_undone(u.change_id)) for u in lease.undo)
        did = f"ended lease {lease.lease_id}; {num_left} changes made under it stay as they are"
        await self._log(command, actor, self._step_now(), "done", did)
        return Ack(id=number, applied_at_step=self._step_now(), did=did)

    def _note_pause(self, lease: Lease | None, was_running: bool) -> None:
        """Who pauses, or resumes, last answers for the pause, so that no lease ends one that isn't its own."""
        if lease is not None and was_running:
            self._leases.put(lease, Resume(reason=_why_undone(lease)))
            self._paused_by = lease.lease_id
        elif lease is None or lease.lease_id != self._paused_by:
            self._paused_by = ""

    async def _run_out(self, lease: Lease) -> None:
        """Take back what was done under a lease, newest first, and go on where somebody else has turned a knob since.

        A change that was undone already (by its maker, or an operator) is none any more; a pause that somebody else has
        renewed isn't the lease's to end.
        """
        while lease.undo:
            undo = lease.undo.pop()
            if isinstance(undo, UndoChange) and self.book.is_undone(undo.change_id):
                continue
            if isinstance(undo, Resume) and self._paused_by != lease.lease_id:
                continue
            with contextlib.suppress(SchedtopError):  # it is in the audit log
                await self.carry_out(0, undo, SERVER)

    def cancel_timers(self) -> None:
        """The engine is ending: no roll-back comes any more."""
        self._leases.cancel()
        for timer in self._timers.values():
            timer.cancel()

    # ---- audit ----------------------------------------------------------------------------------------------

    async def _log_change(
        self,
        command: SetKnobs | UndoChange,
        actor: Actor,
        step: int,
        receipt: KnobChange,
        change: Change | None,
        action: str = "",
        outcome: str = "done",
    ) -> None:
        detail = "nothing: the values were so already" if change is None else f"generation {receipt.generation}"
        if change is not None and change.undoes is not None:
            detail += f", undoes change {change.undoes}"
        if change is not None and isinstance(command, SetKnobs) and command.confirm_within_s is not None:
            detail += f", undone unless confirmed within {command.confirm_within_s:g} s"
        await self._log(
            command,
            actor,
            step,
            outcome,
            detail,
            action=action,
            change_id=change.change_id if change else 0,
            before=receipt.before,
            after=receipt.after,
        )

    async def _log(
        self,
        command: AnyCommand,
        actor: Actor,
        step: int,
        outcome: str,
        detail: str,
        *,
        action: str = "",
        change_id: int = 0,
        before: Any = None,
        after: Any = None,
    ) -> None:
        """Write a row; returns when it is on disk. Raises `AuditFailed` telling what has happened nevertheless."""
        name = action or type(command).__name__
        row = AuditRow(
            wall=time.time(),
            boot_id=self._boot_id,
            step=step,
            actor=actor,
            action=name,
            outcome=outcome,
            reason=getattr(command, "reason", "")[:MAX_REASON],
            detail=detail,
            change_id=change_id,
            before=before,
            after=after if outcome != "refused" else asked(command),
        )
        try:
            await asyncio.wrap_future(self._audit.write(row))
        except AuditFailed as error:
            raise AuditFailed(f"{name} was {outcome} (step {step}: {detail}), but {error}") from None


def asked(command: AnyCommand) -> Any:
    """What a refused command wanted, for its row."""
    return command.changes if isinstance(command, SetKnobs) else None


def check_reason(command: AnyCommand) -> None:
    """Raise `BadCommand` for a reason that isn't one line of `MAX_REASON` characters."""
    reason = getattr(command, "reason", "")
    if len(reason) > MAX_REASON:
        raise BadCommand(f"the reason has {len(reason)} characters, the limit is {MAX_REASON}")
    if len(reason.splitlines()) > 1:
        raise BadCommand("the reason has several lines: give one, it is a row of the audit log")


def _why_undone(lease: Lease) -> str:
    return f"lease {lease.lease_id} wasn't renewed within {lease.within_s:g} s"


def _check_change(command: SetKnobs) -> None:
    if not command.changes:
        raise BadCommand("no knob is named: give at least one change")
    within = command.confirm_within_s
    if within is not None and command.lease_id:
        raise BadCommand("confirm_within_s and lease_id are two ways to have a change undone: give one")
    if within is not None and not 0 < within <= MAX_CONFIRM_S:
        raise BadCommand(f"confirm_within_s={within} is outside its range: above 0, at most {MAX_CONFIRM_S:g} seconds")


def _knobs_ack(number: int, step: int, receipt: KnobChange, change: Change | None, dry_run: bool) -> KnobsAck:
    return KnobsAck(
        id=number,
        applied_at_step=step,
        change_id=change.change_id if change else 0,
        generation=receipt.generation,
        before=receipt.before,
        after=receipt.after,
        dry_run=dry_run,
        confirm_by_mono=change.rolls_back_at if change else None,
        warnings=receipt.warnings,
    )


def undo(core: EngineCore, change: Change, book: ChangeBook) -> KnobChange:
    """Put back what a change replaced. Raises `Conflict` if one of its knobs was changed since; then none is."""
    now = core.set_knobs(change.before, dry_run=True).before
    changed = [name for name, value in change.after.items() if now[name] != value]
    if changed:
        later = "; ".join(str(book.last_of(name) or f"{name} is {now[name]}") for name in changed)
        raise Conflict(f"{', '.join(changed)} was changed since change {change.change_id}, nothing was undone: {later}")
    return core.set_knobs(change.before)
