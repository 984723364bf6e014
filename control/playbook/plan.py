"""A playbook's dry run: every step as change, no change or unknown, with a forecast. Asks and checks, no change."""

from collections.abc import Awaitable, Callable, Iterable, Mapping

from schedtop.control.messages import SetKnobs
from schedtop.control.playbook.formula import NoValue
from schedtop.control.playbook.report import PlannedStep
from schedtop.control.playbook.schema import ACTIONS, Playbook, Step
from schedtop.control.playbook.target import Target, knob_values
from schedtop.control.playbook.values import known_values, resolve
from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.outlook import Forecast

Foresee = Callable[[Mapping[str, KnobValue]], Awaitable[Forecast | str]]
"""The forecast of changes to the knobs as they are, or why there is none."""


def step_in_words(step: Step) -> str:
    """`set max_num_seqs=8`, `wait 10s`, ..."""
    if step.set is not None:
        return "set " + ", ".join(f"{name}={value}" for name, value in step.set.items())
    if step.sweep is not None:
        return f"sweep {step.sweep.knob} over {', '.join(map(str, step.sweep.values))}"
    name = next(name for name in ACTIONS if getattr(step, name) is not None)
    return "resume" if name == "resume" else f"{name} {getattr(step, name)}"


async def plan(playbook: Playbook, target: Target, foresee: Foresee | None = None) -> list[PlannedStep]:
    """What a run would do now. Raises `CommandRefused` if a step would be refused."""
    await target.begin()
    planner = _Planner(target, knob_values(await target.refresh()), foresee)
    planned = [
        PlannedStep(what=text, verdict="unknown", detail="begins then")
        for text in (
            f"schedule {playbook.schedule}" if playbook.schedule else "",
            f"when {playbook.when}" if playbook.when else "",
        )
        if text
    ]
    planned += [await planner.plan(step) for step in playbook.steps]
    planned += [
        PlannedStep(
            what=f"expect {check.expect}",
            verdict="unknown",
            detail=f"else {check.on_fail}, no data: {check.on_no_data}",
        )
        for check in playbook.checks
    ]
    return planned + [await planner.plan(step, is_last=True) for step in playbook.last]


class _Planner:
    """Follows the knobs from step to step, as far as they can be known."""

    def __init__(self, target: Target, initial: dict[str, KnobValue], foresee: Foresee | None) -> None:
        self._target = target
        self._initial = initial
        self._values: dict[str, KnobValue | None] = dict(initial)
        """None where an earlier step's outcome decides."""
        self._foresee = foresee

    async def plan(self, step: Step, is_last: bool = False) -> PlannedStep:
        """One step. A conditional one is unknown, and so is what it touches from then on."""
        what = step_in_words(step)
        if step.wait is not None:
            return PlannedStep(what=what, verdict="no change", detail=_when(step))
        if step.sweep is not None:
            self._values[step.sweep.knob] = None
            return PlannedStep(what=what, verdict="unknown", detail=f"the best that keeps {step.sweep.keep}")
        if step.set is None:
            return PlannedStep(what=what, verdict="unknown", detail=_when(step))
        wanted = known_values(step.set, step.within, self._initial, self._target)
        if wanted:
            await self._target.set_knobs(SetKnobs(changes=wanted, dry_run=True))
        if (step.when is not None and not is_last) or len(wanted) < len(step.set):
            self._values |= dict.fromkeys(step.set)
            return PlannedStep(what=what, verdict="unknown", detail=_when(step) or await self._as_of_now(step))
        return await self._plan_known(what, wanted, _when(step))

    async def _plan_known(self, what: str, wanted: dict[str, KnobValue], detail: str) -> PlannedStep:
        before = {name: self._values[name] for name in wanted}
        self._values |= wanted
        if _has_unknown(before.values()):
            return PlannedStep(what=what, verdict="unknown", detail="an earlier step's outcome decides")
        changes = {name: (old, wanted[name]) for name, old in before.items() if old is not None and old != wanted[name]}
        if not changes:
            return PlannedStep(what=what, verdict="no change", detail=detail)
        forecast, why_none = await self._forecast()
        return PlannedStep(what=what, verdict="change", changes=changes, detail=detail or why_none, forecast=forecast)

    async def _forecast(self) -> tuple[Forecast | None, str]:
        """Of all that differs from now; the knobs back at their start values need none."""
        differing = {n: v for n, v in self._values.items() if v is not None and v != self._initial[n]}
        if self._foresee is None or not differing:
            return None, ""
        found = await self._foresee(differing)
        return (None, f"no forecast: {found}") if isinstance(found, str) else (found, "")

    async def _as_of_now(self, step: Step) -> str:
        """What a computed value would be at this moment: a hint, no promise."""
        assert step.set is not None
        try:
            values = await resolve(step.set, step.within, self._initial, self._target)
        except NoValue as error:
            return str(error)
        return "as of now " + ", ".join(f"{name}={value}" for name, value in values.items())


def _when(step: Step) -> str:
    return f"when {step.when}" if step.when else ""


def _has_unknown(values: Iterable[KnobValue | None]) -> bool:
    return any(value is None for value in values)
