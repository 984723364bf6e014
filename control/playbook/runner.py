"""Runs one playbook once on one target: wait for its moment, do the steps, check, and roll back by compare-and-set.

Time is the engine's own (`mono` of its snapshots). Changes go through the control protocol like anybody's, under a
lease. No check is decided before its whole window has passed, and nothing is kept because time ran out.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from schedtop.control.changes import UnknownChange
from schedtop.control.errors import CommandRefused, Disconnected, NoReply
from schedtop.control.messages import AnyCommand, Drain, KnobsAck, Pause, Resume, SetKnobs, SnapshotUpdate, UndoChange
from schedtop.control.playbook.checks import CheckWatch
from schedtop.control.playbook.events import (
    MomentAwaited,
    Noted,
    OnEvent,
    RolledBack,
    RunEnded,
    StepDone,
    StepStarted,
)
from schedtop.control.playbook.expr import Condition, parse_duration
from schedtop.control.playbook.formula import NoValue
from schedtop.control.playbook.lease import LEASE_S, RunnerLease
from schedtop.control.playbook.plan import step_in_words
from schedtop.control.playbook.report import CheckOutcome, Report, Result, Settings, StepOutcome
from schedtop.control.playbook.schedule import Schedule, parse_schedule
from schedtop.control.playbook.schema import Bounds, Playbook, Step, Sweep
from schedtop.control.playbook.sweep import NothingKept, choose, try_values
from schedtop.control.playbook.target import Target, knob_values
from schedtop.control.playbook.values import all_sets, known_values, resolve
from schedtop.engine.errors import Conflict, SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import PauseState

_TELL_EVERY_S = 1.0
T = TypeVar("T")

Decide = Callable[[list[CheckOutcome]], bool]
"""Asked when a check says `hold`: whether to roll back. Called in a thread."""


def nobody(event: object) -> None:
    """An `OnEvent` that isn't interested."""


class PlaybookRun:
    """One run. `decide` is asked about a hold; None leaves the settings in force."""

    def __init__(
        self,
        playbook: Playbook,
        target: Target,
        decide: Decide | None = None,
        on_event: OnEvent = nobody,
        lease_s: float = LEASE_S,
    ) -> None:
        self._playbook = playbook
        self._target = target
        self._decide = decide
        self._on_event = on_event
        self._reason = f"playbook {playbook.name}"
        self._lease = RunnerLease(target, self._reason, lease_s)
        self._schedule = schedule_of(playbook)
        whens = [playbook.when, *(step.when for step in [*playbook.steps, *playbook.last])]
        self._conditions = {text: Condition(text) for text in whens if text is not None}
        """Looked at every moment, since `for` has to remember."""
        self._initial: dict[str, KnobValue] = {}
        """The knobs at the start."""
        self._ours: dict[str, KnobValue] = {}
        """What this run has set, as it should still be."""
        self._generation = 0
        self._first_step = 0
        """The first engine step that saw the last change."""
        self._undo: list[AnyCommand] = []
        """What takes this run's changes back, in the order they were made."""
        self._steps: list[StepOutcome] = []
        self._checks: list[CheckOutcome] = []
        self._is_unsure = False
        """A change was sent and no receipt came."""
        self._told_at = -_TELL_EVERY_S

    async def run(self, waits_for_moment: bool = True) -> Report:
        """Run it all; an engine that refuses or goes away makes the result `error`. Cancelled, it rolls back first.

        `waits_for_moment`: begin only within the playbook's hours and when its `when` is true.
        """
        stop = self._target.listen(self._look)
        try:
            report = await self._run_all(waits_for_moment)
        except asyncio.CancelledError:
            await asyncio.shield(self._take_back())
            raise
        finally:
            stop()
            self._lease.abandon()
        self._on_event(RunEnded(mono=self._target.now, report=report))
        return report

    async def _run_all(self, waits_for_moment: bool) -> Report:
        try:
            await self._target.begin()
            if waits_for_moment and not await self._await_moment():
                return self._report(Result.NO_DATA, Settings.UNCHANGED, "its moment never came", began=False)
            await self._prepare()
            for index, step in enumerate(self._playbook.steps):
                await self._carry_out(index, step)
            watch = CheckWatch(self._playbook.checks, self._target, self._on_event, self._first_step)
            self._checks = await watch.run()
            report = await self._conclude()
            await self._end_lease(report.settings)
            return report
        except NoValue as error:
            return await self._give_up(Result.NO_DATA, str(error))
        except NothingKept as error:
            return await self._give_up(Result.FAIL, str(error))
        except SchedtopError as error:
            return await self._give_up(Result.ERROR, str(error))

    # ---- steps ----------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Read the start values, take the lease, and have every value checked before the first one changes anything."""
        snapshot = await self._target.refresh()
        self._generation, self._initial = snapshot.generation, knob_values(snapshot)
        for wanted, within in all_sets([*self._playbook.steps, *self._playbook.last]):
            if known := known_values(wanted, within, self._initial, self._target):
                await self._target.set_knobs(SetKnobs(changes=known, dry_run=True))
        if not await self._lease.begin() and self._target.is_live:
            text = "this engine takes no leases: if this process is killed, the changes stay"
            self._on_event(Noted(mono=self._target.now, text=text))

    async def _carry_out(self, index: int, step: Step) -> None:
        """Do a step if its `when` is true now."""
        verdict = self._conditions[step.when].test(self._target.history) if step.when is not None else None
        if verdict is not None and verdict.truth is not True:
            skipped = f"{step.when}: {'unknown' if verdict.truth is None else 'not so'} ({verdict.detail})"
            self._done("steps", index, StepOutcome(what=step_in_words(step), skipped=skipped))
            return
        await self._do("steps", index, step)

    async def _do(self, phase: str, index: int, step: Step) -> None:
        what = step_in_words(step)
        self._on_event(StepStarted(mono=self._target.now, phase=phase, index=index, what=what))
        if step.wait is not None:
            await self._target.wait_until(self._target.now + parse_duration(step.wait))
            outcome = StepOutcome(what=what)
        elif step.set is not None:
            outcome = await self._set(what, step.set, step.within)
        elif step.sweep is not None:
            outcome = await self._sweep(what, step.sweep)
        else:
            outcome = await self._operate(what, step)
        self._done(phase, index, outcome)

    async def _set(self, what: str, wanted: dict[str, KnobValue], within: Bounds) -> StepOutcome:
        self._lease.check()
        values = await resolve(wanted, within, self._initial, self._target)
        receipt = await _to_the_end(self._change(values))
        return StepOutcome(
            what=what,
            changes={n: (b, receipt.after[n]) for n, b in receipt.before.items() if b != receipt.after[n]},
            applied_at_step=receipt.applied_at_step,
            warnings=receipt.warnings,
        )

    async def _change(self, values: dict[str, KnobValue]) -> KnobsAck:
        """Set knobs and note how to undo it."""
        command = SetKnobs(
            changes=values,
            expect_generation=self._generation,
            reason=self._reason,
            lease_id=self._lease.lease_id,
        )
        try:
            receipt = await self._target.set_knobs(command)
        except (Disconnected, NoReply):
            self._is_unsure = True
            raise
        self._generation, self._first_step = receipt.generation, receipt.applied_at_step
        self._ours |= receipt.after
        if receipt.change_id:
            self._undo.append(UndoChange(change_id=receipt.change_id, reason=f"{self._reason}: roll back"))
        return receipt

    async def _sweep(self, what: str, sweep: Sweep) -> StepOutcome:
        """Try all values, then set the best."""
        before = knob_values(await self._target.refresh())[sweep.knob]
        values = [await self._one(sweep.knob, value) for value in sweep.values]

        async def set_value(value: KnobValue) -> int:
            await self._set(what, {sweep.knob: value}, Bounds())
            return self._first_step

        trials = await try_values(sweep, values, set_value, self._target, self._on_event)
        best = choose(sweep, trials)
        await set_value(best.value)
        changes = {sweep.knob: (before, best.value)} if before != best.value else {}
        return StepOutcome(
            what=what, changes=changes, applied_at_step=self._first_step, trials=trials,
            did=f"{sweep.knob} = {best.value} is best: {best.detail}",
        )  # fmt: skip

    async def _one(self, knob: str, value: KnobValue) -> KnobValue:
        return (await resolve({knob: value}, Bounds(), self._initial, self._target))[knob]

    async def _operate(self, what: str, step: Step) -> StepOutcome:
        """Pause, resume, drain. A drain leaves the engine paused."""
        self._lease.check()
        command: AnyCommand = Resume(reason=self._reason)
        lease_id = self._lease.lease_id
        if step.pause is not None:
            assert step.pause in ("abort", "wait", "keep")
            command = Pause(mode=step.pause, reason=self._reason, lease_id=lease_id)  # type: ignore[arg-type]
        elif step.drain is not None:
            command = Drain(limit_s=parse_duration(step.drain), reason=self._reason, lease_id=lease_id)
        was_running = (await self._target.refresh()).pause is PauseState.RUNNING
        if was_running and not isinstance(command, Resume):
            self._undo.append(Resume(reason=f"{self._reason}: roll back"))
        reply = await self._target.request(command, timeout_s=None)
        await self._target.next_moment()  # a drain takes its time: what follows begins now
        self._first_step = getattr(reply, "applied_at_step", self._first_step)
        return StepOutcome(what=what, applied_at_step=self._first_step, did=getattr(reply, "did", ""))

    def _done(self, phase: str, index: int, outcome: StepOutcome) -> None:
        self._steps.append(outcome)
        self._on_event(StepDone(mono=self._target.now, phase=phase, index=index, outcome=outcome))

    # ---- the end --------------------------------------------------------------------------------------------

    async def _conclude(self) -> Report:
        bad = [check for check in self._checks if check.then in ("rollback", "hold")]
        if not bad:
            detail = await self._do_last()
            settings = Settings.KEPT if self._undo else Settings.UNCHANGED
            unproven = any(check.result is Result.NO_DATA for check in self._checks)
            return self._report(Result.NO_DATA if unproven else Result.PASS, settings, detail)
        result = Result.FAIL if any(check.result is Result.FAIL for check in bad) else Result.NO_DATA
        is_wanted = any(check.then == "rollback" for check in bad)
        if is_wanted or (self._decide is not None and await asyncio.to_thread(self._decide, bad)):
            return self._report(result, *await self._roll_back())
        return self._report(result, Settings.HELD if self._undo else Settings.UNCHANGED)

    async def _do_last(self) -> str:
        """The `finally` steps, each when its condition is true, at the latest when the playbook's hours end."""
        for index, step in enumerate(self._playbook.last):
            if not await self._await_last(step):
                return f"the scenario ended before `{step_in_words(step)}` was due"
            self._generation = (await self._target.refresh()).generation  # others may have turned other knobs
            await self._do("finally", index, step)
        return ""

    async def _give_up(self, result: Result, detail: str) -> Report:
        settings, why = await self._roll_back()
        await self._end_lease(settings)
        return self._report(result, settings, "; ".join(dict.fromkeys(filter(None, (detail, why)))))

    async def _roll_back(self) -> tuple[Settings, str]:
        """Undo what this run did, newest first; the engine refuses where somebody else has turned the knob since."""
        if not self._undo:
            return Settings.UNCHANGED, ""
        self._ours = {}
        settings, why = await self._undo_all()
        self._on_event(RolledBack(mono=self._target.now, settings=settings, detail=why))
        return settings, why

    async def _undo_all(self) -> tuple[Settings, str]:
        while self._undo:
            try:
                await self._target.request(self._undo[-1])
            except CommandRefused as error:
                if error.code != UnknownChange.code:  # undone already, by somebody else or with a lost lease
                    return Settings.CONFLICT, error.message
            except (Disconnected, NoReply) as error:
                return Settings.UNKNOWN, str(error)
            self._undo.pop()
        return Settings.ROLLED_BACK, ""

    async def _take_back(self) -> None:
        """Cancelled: undo, and tell the engine that there is nothing left to undo."""
        settings, _ = await self._roll_back()
        await self._end_lease(settings)

    async def _end_lease(self, settings: Settings) -> None:
        """What stays in force is to outlive us; where the engine couldn't be asked, the lease is what undoes it."""
        if settings is Settings.UNKNOWN or self._is_unsure:
            self._lease.abandon()
        else:
            await self._lease.end()

    def _report(self, result: Result, settings: Settings, detail: str = "", began: bool = True) -> Report:
        return Report(
            playbook=self._playbook.name,
            target=self._target.name,
            result=result,
            settings=settings,
            steps=self._steps,
            checks=self._checks,
            detail=detail,
            began=began,
        )

    # ---- moments --------------------------------------------------------------------------------------------

    def _look(self, update: SnapshotUpdate) -> None:
        """At every moment: conditions remember, and our knobs must still be as we set them."""
        for condition in self._conditions.values():
            condition.test(self._target.history)
        snapshot = update.snapshot
        if not self._ours or snapshot.generation < self._generation:
            return
        values = knob_values(snapshot)
        for name, value in self._ours.items():
            if values[name] != value:
                raise Conflict(f"{name} is {values[name]}, this playbook had set {value}: somebody else has turned it")

    async def _await_moment(self) -> bool:
        """Wait until the hours are open and `when` is true; False if the scenario ends before."""
        when = self._playbook.when
        while not self._target.is_over():
            is_open = self._is_open()
            if is_open and (when is None or self._conditions[when].test(self._target.history).truth is True):
                return True
            self._tell_awaited(when if is_open and when is not None else f"{self._playbook.schedule} has come", when)
            await self._target.next_moment()
        return False

    async def _await_last(self, step: Step) -> bool:
        """Wait until a `finally` step is due; False if the scenario ends before."""
        waits_for_hours = self._schedule is not None and self._is_open()
        while not self._target.is_over():
            is_true = step.when is not None and self._conditions[step.when].test(self._target.history).truth is True
            if is_true or (step.when is None and not waits_for_hours) or (waits_for_hours and not self._is_open()):
                return True
            self._tell_awaited(step.when or f"{self._playbook.schedule} is over", step.when)
            await self._target.next_moment()
            self._lease.check()
        return False

    def _is_open(self) -> bool:
        return self._schedule is None or self._schedule.is_open(self._target.snapshot.wall)

    def _tell_awaited(self, what: str, when: str | None) -> None:
        now = self._target.now
        if now < self._told_at + _TELL_EVERY_S:
            return
        self._told_at = now
        verdict = self._conditions[when].test(self._target.history) if when is not None else None
        truth, detail = (verdict.truth, verdict.detail) if verdict is not None else (False, "")
        self._on_event(MomentAwaited(mono=now, what=what, truth=truth, detail=detail))


async def _to_the_end(change: Coroutine[Any, Any, T]) -> T:
    """Await something that must not be left half done: cancelled, it is finished first."""
    task = asyncio.ensure_future(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen
        raise


def schedule_of(playbook: Playbook) -> Schedule | None:
    """The playbook's hours; None = any time."""
    return parse_schedule(playbook.schedule, playbook.timezone) if playbook.schedule is not None else None
