"""A playbook's dry run: every step as change, no change or unknown. Asks and checks; changes nothing."""

from collections.abc import Iterable

from schedtop.control.messages import SetKnobs
from schedtop.control.playbook.engine import Connection, set_knobs, take_snapshot
from schedtop.control.playbook.report import PlannedStep
from schedtop.control.playbook.schema import INITIAL, Playbook, Step
from schedtop.control.playbook.values import is_known_beforehand, knob_values
from schedtop.engine.knobs import KnobValue


def step_in_words(step: Step) -> str:
    """`set max_num_seqs=8`, `wait 10s`, ..."""
    if step.set is not None:
        return "set " + ", ".join(f"{name}={value}" for name, value in step.set.items())
    for name in ("wait", "pause", "drain"):
        if (value := getattr(step, name)) is not None:
            return f"{name} {value}"
    return "resume"


async def plan(playbook: Playbook, engine: Connection) -> list[PlannedStep]:
    """What a run would do now. Raises `CommandRefused` if a step would be refused."""
    initial = knob_values(await take_snapshot(engine))
    values: dict[str, KnobValue | None] = dict(initial)
    planned = [PlannedStep(what=f"when {playbook.when}", verdict="unknown")] if playbook.when else []
    for step in playbook.steps:
        planned.append(await _plan_step(step, engine, initial, values))
    for check in playbook.checks:
        planned.append(PlannedStep(what=f"expect {check.expect}", verdict="unknown", detail=f"else {check.on_fail}"))
    for step in playbook.last:
        planned.append(await _plan_step(step, engine, initial, values))
    return planned


async def _plan_step(
    step: Step, engine: Connection, initial: dict[str, KnobValue], values: dict[str, KnobValue | None]
) -> PlannedStep:
    """Moves `values` on to what they would be; None where that can't be known."""
    what, detail = step_in_words(step), f"when {step.when}" if step.when else ""
    if step.wait is not None:
        return PlannedStep(what=what, verdict="no change", detail=detail)
    if step.set is None or step.when is not None or not all(map(is_known_beforehand, step.set.values())):
        values |= dict.fromkeys(step.set or ())
        return PlannedStep(what=what, verdict="unknown", detail=detail)
    wanted = {name: initial[name] if value == INITIAL else value for name, value in step.set.items()}
    await set_knobs(engine, SetKnobs(changes=wanted, dry_run=True))
    before = {name: values[name] for name in wanted}
    values |= wanted
    if _has_unknown(before.values()):
        return PlannedStep(what=what, verdict="unknown", detail="an earlier step's outcome decides")
    changes = {name: (old, wanted[name]) for name, old in before.items() if old is not None and old != wanted[name]}
    return PlannedStep(what=what, verdict="change" if changes else "no change", changes=changes)


def _has_unknown(values: Iterable[KnobValue | None]) -> bool:
    return any(value is None for value in values)
