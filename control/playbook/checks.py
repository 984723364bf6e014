"""Judges a playbook's checks: on what happens after the last step, each over its whole window, all of them to the end.

Nothing passes because time ran out: what can't be measured is no data, and readings that fail count as a failed check
after so many.
"""

from schedtop.control.errors import Disconnected, NoReply
from schedtop.control.messages import SnapshotUpdate
from schedtop.control.playbook.events import CheckDone, CheckSeen, OnEvent
from schedtop.control.playbook.expr import Condition, Verdict, comparisons
from schedtop.control.playbook.report import CheckOutcome, Result
from schedtop.control.playbook.schema import Check
from schedtop.control.playbook.signals import DEFAULT_WINDOW_S, KEPT_S
from schedtop.control.playbook.target import INTERVAL_S, Target, Watching

_TELL_EVERY_S = 1.0


class CheckWatch:
    """Watches all checks of one run side by side. `from_step`: the first engine step that saw the last change."""

    def __init__(self, checks: list[Check], target: Target, on_event: OnEvent, from_step: int) -> None:
        self._target = target
        self._on_event = on_event
        self._watching = Watching(KEPT_S, from_step)
        self._views = [_CheckView(index, check) for index, check in enumerate(checks)]
        self._num_errors = 0
        self._told_at = -_TELL_EVERY_S

    async def run(self) -> list[CheckOutcome]:
        """Watch until every window is over; outcomes in the order of the file."""
        if not self._views:
            return []
        stop = self._target.listen(self._look)
        start = self._target.now
        try:
            for view in self._views:
                view.until = start + view.window_s
            while any(view.outcome is None for view in self._views):
                await self._next_moment()
                self._judge_due()
        finally:
            stop()
        return [view.outcome for view in self._views if view.outcome is not None]

    def _look(self, update: SnapshotUpdate) -> None:
        self._watching.take(update)
        is_due = self._target.now >= self._told_at + _TELL_EVERY_S
        self._told_at = self._target.now if is_due else self._told_at
        for view in self._views:
            if view.outcome is None:
                view.see(self._watching)
                if is_due:
                    self._on_event(view.seen(self._target.now))

    async def _next_moment(self) -> None:
        """A reading that fails is tried again over a new connection; past its limit it fails the check."""
        try:
            await self._target.next_moment()
            self._num_errors = 0
        except (Disconnected, NoReply) as error:
            self._num_errors += 1
            for view in self._views:
                if view.outcome is None and self._num_errors >= view.check.max_errors:
                    self._done(view, view.broken(self._num_errors, str(error)))
            if any(view.outcome is None for view in self._views):
                await self._try_to_recover()

    async def _try_to_recover(self) -> None:
        try:
            await self._target.recover()
        except (Disconnected, NoReply):
            return  # the next reading fails too, and counts

    def _judge_due(self) -> None:
        for view in self._views:
            if view.outcome is None and self._target.now >= view.until:
                self._done(view, view.judged())

    def _done(self, view: "_CheckView", outcome: CheckOutcome) -> None:
        view.outcome = outcome
        self._on_event(CheckDone(mono=self._target.now, index=view.index, outcome=outcome))


class _CheckView:
    """One check and what is known of it."""

    def __init__(self, index: int, check: Check) -> None:
        self.index = index
        self.check = check
        self.condition = Condition(check.expect)
        self.window_s = _window_s(self.condition)
        self.until = 0.0
        self.outcome: CheckOutcome | None = None
        self._verdict = Verdict(None, "nothing seen yet")

    def see(self, watching: Watching) -> None:
        self._verdict = self.condition.test(watching.history)

    def seen(self, now: float) -> CheckSeen:
        left = max(0.0, self.until - now)
        verdict = self._verdict
        return CheckSeen(
            mono=now, index=self.index, expect=self.check.expect,
            truth=verdict.truth, detail=verdict.detail, seconds_left=left,
        )  # fmt: skip

    def judged(self) -> CheckOutcome:
        check, verdict = self.check, self._verdict
        is_enough = verdict.num_samples >= check.min_samples
        result, then = {
            True: (Result.PASS, "keep"),
            False: (Result.FAIL, check.on_fail),
            None: (Result.NO_DATA, check.on_no_data),
        }[verdict.truth if is_enough else None]
        few = "" if is_enough else f", {check.min_samples} needed"
        return self._outcome(result, verdict.detail + few, then)

    def broken(self, num_errors: int, why: str) -> CheckOutcome:
        detail = f"{num_errors} readings in a row failed, which counts as a failure: {why}"
        return self._outcome(Result.FAIL, detail, self.check.on_fail)

    def _outcome(self, result: Result, detail: str, then: str) -> CheckOutcome:
        return CheckOutcome(
            expect=self.check.expect, result=result, detail=detail, num_samples=self._verdict.num_samples, then=then
        )


def _window_s(condition: Condition) -> float:
    """How long to watch: without a span the default window; `for` begins with the first snapshot."""
    leaves = comparisons(condition.root)
    grace_s = 2 * INTERVAL_S if any(leaf.held_s for leaf in leaves) else 0.0
    return grace_s + max(_leaf_window_s(leaf.over_s, leaf.held_s) for leaf in leaves)


def _leaf_window_s(over_s: float | None, held_s: float | None) -> float:
    return (over_s or 0.0) + (held_s or 0.0) or DEFAULT_WINDOW_S
