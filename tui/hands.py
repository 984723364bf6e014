"""What the operator does to the engine: builds commands, sends them, words the acknowledgement. Draws nothing.

Nothing here changes what is shown of the engine: a command is pending until its reply, and values come from snapshots.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AnyCommand,
    ConfirmChange,
    Drain,
    HoldRequests,
    KnobsAck,
    Pause,
    PreemptRequests,
    ReleaseRequests,
    Reply,
    RequestFilter,
    ResetPrefixCache,
    Resume,
    SelfCheck,
    SetKnobs,
    SetPriority,
    UndoChange,
)  # fmt: skip
from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import RequestRow
from schedtop.tui.format import value_text
from schedtop.tui.link import Link, Refusal
from schedtop.tui.state import Action, Outcome

CONFIRM_WITHIN_S = 60.0
DRAIN_LIMIT_S = 25.0
"""Shorter than the client's patience, so that an answer always comes."""


class Operator:
    """Sends one operator's commands over a link; `report` is told what is pending and what came back."""

    def __init__(self, link: Callable[[], Link], report: Callable[[Action], None]) -> None:
        self._link = link
        self._report = report
        self.own_changes: set[int] = set()
        """Numbers of the knob changes made from here."""

    async def send(self, what: str, commands: Sequence[AnyCommand]) -> list[Reply | Refusal]:
        """Send `commands` in order and report the outcome as one action."""
        self._report(Action(what, Outcome.PENDING))
        replies = [await self._link().request(command) for command in commands]
        refusals = [reply for reply in replies if isinstance(reply, Refusal)]
        self.own_changes |= {reply.change_id for reply in replies if isinstance(reply, KnobsAck)}
        outcome = Outcome.REFUSED if refusals else Outcome.DONE
        answer = refusals[0].message if refusals else "; ".join(dict.fromkeys(map(worded, replies)))
        is_receipt = isinstance(replies[-1], KnobsAck) or (refusals and isinstance(commands[0], SetKnobs))
        self._report(Action("" if is_receipt else what, outcome, answer))
        return replies

    async def apply(self, changes: Mapping[str, KnobValue], generation: int, confirmed: bool) -> bool:
        """Apply staged values, based on `generation`; True when the engine took them."""
        words = ", ".join(f"{name}={value_text(value)}" for name, value in changes.items())
        command = SetKnobs(
            changes=dict(changes),
            expect_generation=generation,
            confirm_within_s=CONFIRM_WITHIN_S if confirmed else None,
            reason="from the screen",
        )
        return not isinstance((await self.send(f"set {words}", [command]))[0], Refusal)

    async def undo(self) -> None:
        """Roll the last change back."""
        await self.send("undo the last change", [UndoChange(reason="from the screen")])

    async def keep(self, change_id: int) -> None:
        """Keep a change that would be undone by itself."""
        await self.send(f"keep change {change_id}", [ConfirmChange(change_id=change_id)])

    async def move_priority(self, rows: Iterable[RequestRow], delta: int) -> None:
        """Add `delta` to the priority of each request; requests of one value go in one command."""
        groups: dict[int, list[str]] = {}
        for row in rows:
            groups.setdefault(row.priority + delta, []).append(row.request_id)
        commands = [
            SetPriority(select=RequestFilter(ids=ids), priority=priority, reason="from the screen")
            for priority, ids in sorted(groups.items())
        ]
        words = "; ".join(f"priority {priority} for {named(ids)}" for priority, ids in sorted(groups.items()))
        await self.send(words, commands)

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests."""
        await self.send(
            f"abort {named(ids)}", [AbortRequests(select=RequestFilter(ids=list(ids)), reason="from the screen")]
        )

    async def hold(self, ids: Sequence[str], release: bool) -> None:
        """Keep requests back, or let them go."""
        command = ReleaseRequests if release else HoldRequests
        what = f"{'release' if release else 'hold'} {named(ids)}"
        await self.send(what, [command(select=RequestFilter(ids=list(ids)), reason="from the screen")])

    async def preempt(self, ids: Sequence[str]) -> None:
        """Throw requests back to the queue."""
        select = RequestFilter(ids=list(ids))
        await self.send(f"preempt {named(ids)}", [PreemptRequests(select=select, reason="from the screen")])

    async def drain(self) -> None:
        """Admit nobody new; answered when nothing is left."""
        await self.send("drain", [Drain(limit_s=DRAIN_LIMIT_S, reason="from the screen")])

    async def reset_cache(self) -> None:
        """Forget cached prefixes that nobody uses."""
        await self.send("reset the prefix cache", [ResetPrefixCache(reason="from the screen")])

    async def self_check(self) -> None:
        """Have the engine prove its accounting."""
        await self.send("self-check", [SelfCheck()])

    async def pause(self, resume: bool) -> None:
        """Freeze the engine as it is, or let it go on."""
        command = Resume(reason="from the screen") if resume else Pause(mode="keep", reason="from the screen")
        await self.send("resume the engine" if resume else "pause the engine", [command])


def named(ids: Sequence[str]) -> str:
    """Ids in words: the first two, then how many more.

    >>> named(["a"]), named(["a", "b", "c", "d"])
    ('a', 'a, b and 2 more')
    """
    shown = ", ".join(ids[:2])
    return shown if len(ids) <= 2 else f"{shown} and {len(ids) - 2} more"


def worded(reply: Reply | Refusal) -> str:
    """An acknowledgement as the action line shows it."""
    if isinstance(reply, KnobsAck):
        changes = ", ".join(
            f"{name} {value_text(reply.before[name])} → {value_text(after)}" for name, after in reply.after.items()
        )
        warnings = "".join(f" · warning: {warning}" for warning in reply.warnings)
        kept = " · undone by itself unless kept (K)" if reply.confirm_by_mono is not None else ""
        return f"applied @ step {reply.applied_at_step}: {changes} (generation {reply.generation}){kept}{warnings}"
    if isinstance(reply, Ack):
        words = reply.did or "done"
        if reply.touched is not None and not reply.touched.found:
            words = "no such request is live any more"
        return f"{words} @ step {reply.applied_at_step}"
    return ""
