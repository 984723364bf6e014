"""What a running playbook tells, as typed events, and their fold into one picture of the run.

The command line prints the events, the gateway keeps the picture, the screen draws it: all from here.
"""

from collections.abc import Callable

import msgspec

from schedtop.control.playbook.plan import step_in_words
from schedtop.control.playbook.report import (
    CheckOutcome,
    Report,
    Settings,
    StepOutcome,
    Trial,
    changes_in_words,
)
from schedtop.control.playbook.schema import Playbook


class _Event(msgspec.Struct, kw_only=True, tag=True):
    mono: float
    """The engine's clock."""


class MomentAwaited(_Event):
    """The run waits for something to become true; told again about once a second. `truth` None = no data."""

    what: str
    truth: bool | None = None
    detail: str = ""


class StepStarted(_Event):
    """`index` counts within `phase`: `steps` or `finally`."""

    phase: str
    index: int
    what: str


class TrialDone(_Event):
    """A sweep has measured one value."""

    trial: Trial


class StepDone(_Event):
    """Carried out, or passed over."""

    phase: str
    index: int
    outcome: StepOutcome


class CheckSeen(_Event):
    """How a check stands; told about once a second until its window is over. `truth` None = no data yet."""

    index: int
    expect: str
    truth: bool | None
    detail: str
    seconds_left: float


class CheckDone(_Event):
    """Judged."""

    index: int
    outcome: CheckOutcome


class Noted(_Event):
    """Something worth knowing that is no step and no check."""

    text: str


class RolledBack(_Event):
    """What became of the attempt to undo this run's changes."""

    settings: Settings
    detail: str = ""


class RunEnded(_Event):
    """The last event of a run."""

    report: Report


RunEvent = (
    MomentAwaited | StepStarted | TrialDone | StepDone | CheckSeen | CheckDone | Noted | RolledBack | RunEnded
)  # fmt: skip
OnEvent = Callable[[RunEvent], None]


class Line(msgspec.Struct, kw_only=True):
    """A step or a check as a list shows it. `state`: to come, now, done, skipped, or a check's result."""

    what: str
    state: str = "to come"
    detail: str = ""


class Progress(msgspec.Struct, kw_only=True):
    """A run as it stands: feed it every event."""

    playbook: str
    target: str = ""
    phase: str = "waiting"
    """waiting, steps, checks, finally, ended."""
    steps: list[Line] = []
    checks: list[Line] = []
    last: list[Line] = []
    doing: str = ""
    """What it does now, in words."""
    report: Report | None = None

    @classmethod
    def of(cls, playbook: Playbook, target: str = "") -> "Progress":
        """Before the first event."""
        return cls(
            playbook=playbook.name,
            target=target,
            steps=[Line(what=step_in_words(step)) for step in playbook.steps],
            checks=[Line(what=check.expect) for check in playbook.checks],
            last=[Line(what=step_in_words(step)) for step in playbook.last],
        )

    def take(self, event: RunEvent) -> None:
        """Move on by an event."""
        self.doing = in_words(event) or self.doing
        match event:
            case StepStarted():
                self.phase = event.phase
                self._lines(event.phase)[event.index].state = "now"
            case StepDone():
                line, outcome = self._lines(event.phase)[event.index], event.outcome
                line.state = "skipped" if outcome.skipped else "done"
                line.detail = outcome.skipped or outcome.did or changes_in_words(outcome.changes)
            case CheckSeen():
                self.phase = "checks"
                self.checks[event.index] = Line(what=event.expect, state="now", detail=event.detail)
            case CheckDone():
                outcome_of_check = event.outcome
                self.checks[event.index] = Line(
                    what=outcome_of_check.expect, state=outcome_of_check.result, detail=outcome_of_check.detail
                )
            case RunEnded():
                self.phase, self.report = "ended", event.report

    def _lines(self, phase: str) -> list[Line]:
        return self.last if phase == "finally" else self.steps


def in_words(event: RunEvent) -> str:
    """One line for people."""
    match event:
        case MomentAwaited():
            return f"waiting until {event.what}" + (f" ({event.detail})" if event.detail else "")
        case StepStarted():
            return event.what
        case TrialDone():
            return f"  {event.trial.value}: {event.trial.detail}"
        case StepDone(outcome=outcome):
            return _step_in_words(outcome)
        case CheckSeen():
            word = {True: "holds", False: "doesn't hold", None: "no data"}[event.truth]
            return f"expect {event.expect}: {word} ({event.detail}), {event.seconds_left:.0f} s left"
        case CheckDone(outcome=outcome):
            return f"expect {outcome.expect}: {outcome.result} ({outcome.detail})"
        case Noted():
            return event.text
        case RolledBack():
            if event.settings is Settings.ROLLED_BACK:
                return "rolled back: the values are those from before the first step"
            return f"roll-back: {event.settings}" + (f", {event.detail}" if event.detail else "")
        case _:
            return report_in_words(event.report)


def _step_in_words(outcome: StepOutcome) -> str:
    if outcome.skipped:
        return f"{outcome.what}: passed over, {outcome.skipped}"
    if outcome.applied_at_step is None:
        return ""
    return f"  in force from step {outcome.applied_at_step}: {outcome.did or changes_in_words(outcome.changes)}"


def report_in_words(report: Report) -> str:
    """How it ended, in a line."""
    if not report.began:
        return f"{report.playbook}: its moment never came"
    line = f"{report.playbook}: {report.result}; settings {report.settings}"
    if report.settings is Settings.HELD:
        line += " (take them back with `u` on the screen or `schedtop knobs undo`)"
    return f"{line}: {report.detail}" if report.detail else line
