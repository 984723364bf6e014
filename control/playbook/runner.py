"""Runs one playbook against one engine: wait for its moment, set, wait, check, and roll back by compare-and-set.

Time is the engine's own (`mono` of its snapshots). Changes go through the control protocol like anybody's. No check is
decided before its whole window has passed, and nothing is kept because time ran out.
"""

import asyncio
from collections.abc import Callable

from schedtop.control.errors import CommandRefused, Disconnected, NoReply
from schedtop.control.messages import (
    AnyCommand,
    Drain,
    Goodbye,
    Pause,
    Resume,
    SetKnobs,
    SnapshotUpdate,
    Subscribe,
    UndoChange,
)
from schedtop.control.playbook.engine import NO_ROWS, Connection, set_knobs, step_model, take_snapshot
from schedtop.control.playbook.expr import Condition, comparisons, parse_duration
from schedtop.control.playbook.plan import step_in_words
from schedtop.control.playbook.report import CheckOutcome, Report, Result, Settings, StepOutcome, changes_in_words
from schedtop.control.playbook.schema import INITIAL, Check, Playbook, Step
from schedtop.control.playbook.signals import DEFAULT_WINDOW_S, SignalHistory
from schedtop.control.playbook.values import is_known_beforehand, knob_values, needs_model, resolve
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import PauseState, Snapshot

INTERVAL_S = 0.25
"""Between snapshots."""
SILENCE_S = 30.0
"""Without a snapshot for so long the run ends with an error."""

Decide = Callable[[list[CheckOutcome]], bool]
"""Asked when a check says `hold`: whether to roll back."""


class PlaybookRun:
    """One run. `decide` is asked about a hold; None leaves the settings in force."""

    def __init__(
        self,
        playbook: Playbook,
        engine: Connection,
        decide: Decide | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._playbook = playbook
        self._engine = engine
        self._decide = decide
        self._say = say
        self._specs = {spec.name: spec for spec in engine.welcome.knobs}
        self._reason = f"playbook {playbook.name}"
        self._history = SignalHistory()
        self._since_steps = SignalHistory()
        """What happened since the last step: all that checks may look at."""
        whens = [playbook.when, *(step.when for step in [*playbook.steps, *playbook.last])]
        self._conditions = {text: Condition(text) for text in whens if text is not None}
        """Looked at every moment, since `for` has to remember."""
        self._snapshot: Snapshot
        self._initial: dict[str, KnobValue] = {}
        """The knobs at the start."""
        self._generation = 0
        self._undo: list[AnyCommand] = []
        """What takes this run's changes back, in the order they were made."""
        self._steps: list[StepOutcome] = []
        self._checks: list[CheckOutcome] = []

    async def run(self, waits_for_moment: bool = True) -> Report:
        """Run it all; an engine that refuses or goes away makes the result `error`. Cancelled, it rolls back first.

        `waits_for_moment`: begin only when the playbook's `when` is true.
        """
        try:
            await self._watch()
            if waits_for_moment and self._playbook.when is not None:
                await self._await_truth(self._playbook.when)
            await self._prepare()
            for step in self._playbook.steps:
                await self._carry_out(step)
            await self._check_all()
            return await self._conclude()
        except SchedtopError as error:
            return await self._give_up(str(error))
        except asyncio.CancelledError:
            await asyncio.shield(self._roll_back())
            raise

    # ---- steps ----------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Read the start values and have every value checked before the first one changes anything."""
        self._snapshot = await take_snapshot(self._engine)
        self._generation, self._initial = self._snapshot.generation, knob_values(self._snapshot)
        for step in [*self._playbook.steps, *self._playbook.last]:
            known = {n: v for n, v in (step.set or {}).items() if v != INITIAL and is_known_beforehand(v)}
            if known:
                await set_knobs(self._engine, SetKnobs(changes=known, dry_run=True))

    async def _carry_out(self, step: Step) -> None:
        """Do a step if its `when` is true now."""
        verdict = self._conditions[step.when].test(self._history) if step.when is not None else None
        if verdict is not None and verdict.truth is not True:
            skipped = f"{step.when}: {'unknown' if verdict.truth is None else 'not so'} ({verdict.detail})"
            self._done(StepOutcome(what=step_in_words(step), skipped=skipped))
            return
        await self._do(step)

    async def _do(self, step: Step) -> None:
        self._say(step_in_words(step))
        if step.wait is not None:
            await self._wait_until(self._history.now + parse_duration(step.wait))
            self._done(StepOutcome(what=step_in_words(step)))
        elif step.set is not None:
            await self._set(step)
        else:
            await self._operate(step)

    async def _set(self, step: Step) -> None:
        fitted = await step_model(self._engine) if needs_model(step) else None
        wanted = resolve(step, self._initial, self._specs, fitted, self._snapshot)
        receipt = await set_knobs(
            self._engine, SetKnobs(changes=wanted, expect_generation=self._generation, reason=self._reason)
        )
        self._generation = receipt.generation
        if receipt.change_id:
            self._undo.append(UndoChange(change_id=receipt.change_id, reason=f"{self._reason}: roll back"))
        self._done(
            StepOutcome(
                what=step_in_words(step),
                changes={n: (b, receipt.after[n]) for n, b in receipt.before.items() if b != receipt.after[n]},
                applied_at_step=receipt.applied_at_step,
                warnings=receipt.warnings,
            )
        )

    async def _operate(self, step: Step) -> None:
        """Pause, resume, drain. A drain leaves the engine paused."""
        command: AnyCommand = Resume(reason=self._reason)
        if step.pause is not None:
            assert step.pause in ("abort", "wait", "keep")
            command = Pause(mode=step.pause, reason=self._reason)  # type: ignore[arg-type]
        elif step.drain is not None:
            command = Drain(limit_s=parse_duration(step.drain), reason=self._reason)
        was_running = (await take_snapshot(self._engine)).pause is PauseState.RUNNING
        if was_running and not isinstance(command, Resume):
            self._undo.append(Resume(reason=f"{self._reason}: roll back"))
        reply = await self._engine.request(command, timeout_s=None)
        self._done(StepOutcome(what=step_in_words(step), applied_at_step=getattr(reply, "applied_at_step", None)))

    def _done(self, outcome: StepOutcome) -> None:
        self._steps.append(outcome)
        if outcome.skipped:
            self._say(f"{outcome.what}: passed over, {outcome.skipped}")
        elif outcome.applied_at_step is not None:
            self._say(f"  in force from step {outcome.applied_at_step}: {changes_in_words(outcome.changes)}")

    # ---- checks ---------------------------------------------------------------------------------------------

    async def _check_all(self) -> None:
        """Decide every check on what happens from now on, each when its window is over; the shortest first."""
        self._since_steps = SignalHistory()
        start = self._history.now
        conditions = {check.expect: Condition(check.expect) for check in self._playbook.checks}
        for check in sorted(self._playbook.checks, key=_window_s):
            self._say(f"expect {check.expect}: watching for {_window_s(check):g} s")
            while self._history.now < start + _window_s(check):
                await self._next_moment()
                for condition in conditions.values():
                    condition.test(self._since_steps)
            self._checks.append(_judge(check, conditions[check.expect], self._since_steps))
            self._say(f"  {self._checks[-1].result}: {self._checks[-1].detail}")

    async def _conclude(self) -> Report:
        bad = [check for check in self._checks if check.then in ("rollback", "hold")]
        unproven = any(check.result is Result.NO_DATA for check in self._checks)
        if not bad:
            for step in self._playbook.last:
                if step.when is not None:
                    await self._await_truth(step.when)
                await self._do(step)
            settings = Settings.KEPT if self._undo else Settings.UNCHANGED
            return self._report(Result.NO_DATA if unproven else Result.PASS, settings)
        result = Result.FAIL if any(check.result is Result.FAIL for check in bad) else Result.NO_DATA
        is_wanted = any(check.then == "rollback" for check in bad)
        if is_wanted or (self._decide is not None and await asyncio.to_thread(self._decide, bad)):
            return self._report(result, *await self._roll_back())
        return self._report(result, Settings.HELD if self._undo else Settings.UNCHANGED)

    # ---- the end --------------------------------------------------------------------------------------------

    async def _give_up(self, detail: str) -> Report:
        settings, why = await self._roll_back()
        return self._report(Result.ERROR, settings, f"{detail}; {why}" if why else detail)

    async def _roll_back(self) -> tuple[Settings, str]:
        """Undo what this run did, newest first; the engine refuses where somebody else has turned the knob since."""
        if not self._undo:
            return Settings.UNCHANGED, ""
        while self._undo:
            try:
                await self._engine.request(self._undo[-1])
            except CommandRefused as error:
                return Settings.CONFLICT, error.message
            except (Disconnected, NoReply) as error:
                return Settings.UNKNOWN, str(error)
            self._undo.pop()
        self._say("rolled back: the values are those from before the first step")
        return Settings.ROLLED_BACK, ""

    def _report(self, result: Result, settings: Settings, detail: str = "") -> Report:
        return Report(
            playbook=self._playbook.name,
            result=result,
            settings=settings,
            steps=self._steps,
            checks=self._checks,
            detail=detail,
        )

    # ---- the engine's clock ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        self._updates = self._engine.messages()
        await self._engine.request(Subscribe(interval_s=INTERVAL_S, viewport=NO_ROWS, events=False))
        await self._next_moment()

    async def _next_moment(self) -> float:
        """Take in the next snapshot; returns its time."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await anext(self._updates)
            except TimeoutError:
                raise Disconnected(f"no snapshot for {SILENCE_S:g} s: the engine hangs") from None
            match message:
                case SnapshotUpdate():
                    self._snapshot = message.snapshot
                    for history in (self._history, self._since_steps):
                        history.add_steps(message.steps)
                        history.add_snapshot(message.snapshot)
                    for condition in self._conditions.values():
                        condition.test(self._history)
                    return self._history.now
                case Goodbye():
                    raise Disconnected(message.reason)

    async def _wait_until(self, mono: float) -> None:
        while self._history.now < mono:
            await self._next_moment()

    async def _await_truth(self, text: str) -> None:
        self._say(f"waiting until {text}")
        while self._conditions[text].test(self._history).truth is not True:
            await self._next_moment()


def _window_s(check: Check) -> float:
    """How long to watch: without a span the default window; `for` begins with the first snapshot."""
    leaves = comparisons(Condition(check.expect).root)
    grace_s = 2 * INTERVAL_S if any(leaf.held_s for leaf in leaves) else 0.0
    return grace_s + max(leaf.over_s or leaf.held_s or DEFAULT_WINDOW_S for leaf in leaves)


def _judge(check: Check, condition: Condition, history: SignalHistory) -> CheckOutcome:
    verdict = condition.test(history)
    truth = verdict.truth if verdict.num_samples >= check.min_samples else None
    result, then = {
        True: (Result.PASS, "keep"),
        False: (Result.FAIL, check.on_fail),
        None: (Result.NO_DATA, check.on_no_data),
    }[truth]
    few = f", {check.min_samples} needed" if verdict.num_samples < check.min_samples else ""
    return CheckOutcome(
        expect=check.expect, result=result, detail=verdict.detail + few, num_samples=verdict.num_samples, then=then
    )
