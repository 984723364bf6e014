"""The autopilot: every few seconds it looks ahead with other knobs and sets the best, within bounds, until it is ended.

What to set is `engine.sim.autopilot`'s to say. Here is how it is done safely: every move is a change set with its
reason in the audit log, under a lease, so that the start values come back if this process dies; a knob that somebody
else has turned ends the flight and keeps that value; at the end the start values are restored.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

import msgspec

from schedtop.control.client import CommandRefused
from schedtop.control.errors import Disconnected, NoReply
from schedtop.control.messages import SetKnobs
from schedtop.control.playbook.lease import LEASE_S, RunnerLease
from schedtop.control.playbook.target import Target, knob_values
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.autopilot import KNOBS, Bounds, Decision, decide
from schedtop.engine.sim.goodput import Slo
from schedtop.engine.snapshot import PauseState, Snapshot

THINK_S = 1.0
"""A decision is carried out so long after the look it rests on, in simulations too: thinking takes time."""
ACTOR = "autopilot"


class Ending(StrEnum):
    """What became of the knobs."""

    UNCHANGED = "unchanged"
    RESTORED = "start values restored"
    CONFLICT = "left where somebody else has turned a knob, the rest restored"
    UNKNOWN = "the engine could not be asked; its lease restores the start values"


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `changes`: name -> (before, after)."""

    mono: float
    changes: dict[str, tuple[KnobValue, KnobValue]]
    applied_at_step: int
    reason: str


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    moves: list[Move]
    num_decisions: int
    ending: Ending
    detail: str = ""


OnMove = Callable[[Move], None]


class Autopilot:
    """One flight on one engine."""

    def __init__(
        self,
        target: Target,
        slo: Slo,
        bounds: Bounds,
        *,
        every_s: float = 3.0,
        cpu_limit_s: float = 2.0,
        on_move: OnMove = lambda move: None,
        lease_s: float = LEASE_S,
    ) -> None:
        """`every_s`: seconds from one look to the next; `cpu_limit_s`: CPU time of one decision at most."""
        self._target = target
        self._slo = slo
        self._bounds = bounds
        self._every_s = every_s
        self._cpu_limit_s = cpu_limit_s
        self._on_move = on_move
        self._lease = RunnerLease(target, ACTOR, lease_s)
        self._start: dict[str, KnobValue] = {}
        self._ours: dict[str, KnobValue] = {}
        """What this flight has set, as it should still be."""
        self._moves: list[Move] = []
        self._num_decisions = 0
        self._flying: asyncio.Task[None] | None = None
        self._is_off = False

    async def run(self, for_s: float | None = None) -> Flight:
        """Fly for so many seconds, or until switched off, or until a scenario is over; then restore the start values.

        An engine that refuses or goes away ends the flight, and its ending says so. Cancelled, it restores first.
        """
        detail = ""
        self._flying = asyncio.create_task(self._fly(for_s), name=ACTOR)
        try:
            await self._flying
        except asyncio.CancelledError:
            if not self._is_off:
                self._flying.cancel()
                await asyncio.shield(self._restore())
                raise
            detail = "switched off"
        except SchedtopError as error:
            detail = str(error)
        ending, why = await self._restore()
        detail = "; ".join(filter(None, (detail, why)))
        return Flight(moves=self._moves, num_decisions=self._num_decisions, ending=ending, detail=detail)

    def off(self) -> None:
        """The off switch: `run` restores the start values and returns."""
        self._is_off = True
        if self._flying is not None:
            self._flying.cancel()

    async def think(self) -> Decision | None:
        """Look at the engine and choose; None while it is paused or its step times aren't known yet."""
        snapshot = await self._target.refresh()
        fitted = await self._target.step_model()
        if snapshot.pause is not PauseState.RUNNING or fitted is None:
            return None
        state = await self._target.state()
        seed, self._num_decisions = self._num_decisions, self._num_decisions + 1

        def choose() -> Decision:
            return decide(state, fitted, self._slo, self._bounds, cpu_limit_s=self._cpu_limit_s, seed=seed)

        return await asyncio.to_thread(choose) if self._target.is_live else choose()

    async def _fly(self, for_s: float | None) -> None:
        target = self._target
        await target.begin()
        self._start = _chosen(await target.refresh())
        await self._lease.begin()
        end = float("inf") if for_s is None else target.now + for_s
        while not target.is_over() and target.now < end:
            looked_at = target.now
            decision = await self.think()
            await target.wait_until(min(looked_at + THINK_S, end))
            if decision is not None and decision.changes:
                await self._move(decision)
            await target.wait_until(min(looked_at + self._every_s, end))

    async def _move(self, decision: Decision) -> None:
        self._lease.check()
        snapshot = await self._target.refresh()
        if foreign := self._turned_by_others(snapshot):
            raise CommandRefused("conflict", f"{foreign} was turned by somebody else: the autopilot is off")
        if snapshot.pause is not PauseState.RUNNING:
            return
        command = SetKnobs(
            changes=decision.changes,
            expect_generation=snapshot.generation,
            reason=f"{ACTOR}: {decision.reason}",
            lease_id=self._lease.lease_id,
        )
        receipt = await self._target.set_knobs(command)
        self._ours |= receipt.after
        move = Move(
            mono=self._target.now,
            changes={name: (before, receipt.after[name]) for name, before in receipt.before.items()},
            applied_at_step=receipt.applied_at_step,
            reason=decision.reason,
        )
        self._moves.append(move)
        self._on_move(move)

    def _turned_by_others(self, snapshot: Snapshot) -> str:
        """The first knob that isn't as we set it, or found it; "" if there is none."""
        present = _chosen(snapshot)
        return next((name for name, value in {**self._start, **self._ours}.items() if present[name] != value), "")

    async def _restore(self) -> tuple[Ending, str]:
        """Put back what is still as this flight has set it, and tell the engine that the lease has done its work."""
        ending = Ending.RESTORED if self._ours else Ending.UNCHANGED
        try:
            snapshot = await self._target.refresh()
            present = _chosen(snapshot)
            untouched = [name for name, value in self._ours.items() if present[name] == value]
            if len(untouched) < len(self._ours):
                ending = Ending.CONFLICT
            back = {name: self._start[name] for name in untouched if present[name] != self._start[name]}
            if back:
                await self._target.set_knobs(
                    SetKnobs(
                        changes=back, expect_generation=snapshot.generation, reason=f"{ACTOR} off: the start values"
                    )
                )
            await self._lease.end()
        except CommandRefused as error:
            self._lease.abandon()
            return Ending.CONFLICT, error.message
        except (Disconnected, NoReply) as error:
            self._lease.abandon()
            return Ending.UNKNOWN, str(error)
        return ending, ""


def _chosen(snapshot: Snapshot) -> dict[str, KnobValue]:
    values = knob_values(snapshot)
    return {name: values[name] for name in KNOBS}
