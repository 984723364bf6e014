"""What a playbook's run or dry run came to, as structs: for people, for scripts (JSON) and for tests."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.outlook import Forecast


class Result(StrEnum):
    """How a run ended. Having no data is not passing."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    NO_DATA = "no data"


class Settings(StrEnum):
    """What became of the changes."""

    UNCHANGED = "unchanged"
    KEPT = "kept"
    ROLLED_BACK = "rolled back"
    HELD = "held"
    """Left in force, for a person to decide."""
    CONFLICT = "conflict"
    """Not (all) rolled back: somebody else has turned one of the knobs since."""
    UNKNOWN = "unknown"
    """The engine could not be asked; where it takes leases, it undoes them by itself."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a sweep and what was measured with it."""

    value: KnobValue
    keeps: bool | None
    """Whether the condition held; None: no data."""
    goal: float | None
    """What is to be lowest or highest; None: no data."""
    detail: str


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One step: knobs as (before, after) where they differ, and the first engine step that saw the change."""

    what: str
    changes: dict[str, tuple[KnobValue, KnobValue]] = {}
    applied_at_step: int | None = None
    warnings: list[str] = []
    skipped: str = ""
    """Why it was passed over: its `when` wasn't true."""
    did: str = ""
    """What an operation reported."""
    trials: list[Trial] = []


class CheckOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what it expected, what was measured."""

    expect: str
    result: Result
    detail: str
    num_samples: int
    then: str
    """What is done about this result: keep, rollback, hold or ignore."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    playbook: str
    result: Result
    settings: Settings
    steps: list[StepOutcome]
    checks: list[CheckOutcome]
    detail: str = ""
    target: str = ""
    began: bool = True
    """False: its moment never came."""


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a dry run: what the step would do, as far as that is known beforehand."""

    what: str
    verdict: str
    """`change`, `no change` or `unknown`; never a guess."""
    changes: dict[str, tuple[KnobValue, KnobValue]] = {}
    detail: str = ""
    forecast: Forecast | None = None
    """Of this change together with those before it."""


def changes_in_words(changes: Mapping[str, tuple[object, object]]) -> str:
    """`max_num_seqs 16 -> 8`, or that nothing changes."""
    return ", ".join(f"{name} {before} -> {after}" for name, (before, after) in changes.items()) or "no change"
