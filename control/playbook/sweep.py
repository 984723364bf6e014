"""A sweep on the live load: each value in turn, let it settle, measure, and choose the best of those that keep the
condition. Setting the knob is its caller's business.
"""

from collections.abc import Awaitable, Callable, Sequence

from schedtop.control.playbook.events import OnEvent, TrialDone
from schedtop.control.playbook.expr import Condition, parse_duration, with_windows
from schedtop.control.playbook.formula import NoValue
from schedtop.control.playbook.reader import parse_best
from schedtop.control.playbook.report import Trial
from schedtop.control.playbook.schema import Sweep
from schedtop.control.playbook.target import Target, Watching
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue

SetValue = Callable[[KnobValue], Awaitable[int]]
"""Sets the knob; returns the first engine step that sees it."""


class NothingKept(SchedtopError):
    """No value of a sweep kept its condition."""

    code = "nothing_kept"


async def try_values(
    sweep: Sweep, values: Sequence[KnobValue], set_value: SetValue, target: Target, on_event: OnEvent
) -> list[Trial]:
    """Measure each value in turn; the knob is left at the last one."""
    trials = []
    for value in dict.fromkeys(values):
        from_step = await set_value(value)
        await target.wait_until(target.now + parse_duration(sweep.settle))
        trials.append(await _measure(sweep, value, target, from_step))
        on_event(TrialDone(mono=target.now, trial=trials[-1]))
    return trials


def choose(sweep: Sweep, trials: Sequence[Trial]) -> Trial:
    """The best trial that kept the condition. Raises `NothingKept`, or `NoValue` where nothing could be measured."""
    kept = [trial for trial in trials if trial.keeps and trial.goal is not None]
    if not kept:
        if all(trial.keeps is None or trial.goal is None for trial in trials):
            raise NoValue(f"the sweep of {sweep.knob} measured nothing: {trials[-1].detail}")
        raise NothingKept(f"no value of {sweep.knob} keeps {sweep.keep}: {_table(trials)}")
    is_highest, _ = parse_best(sweep.best)
    return (max if is_highest else min)(kept, key=_goal)


def _goal(trial: Trial) -> float:
    assert trial.goal is not None
    return trial.goal


def _table(trials: Sequence[Trial]) -> str:
    return "; ".join(f"{trial.value}: {trial.detail}" for trial in trials)


async def _measure(sweep: Sweep, value: KnobValue, target: Target, from_step: int) -> Trial:
    window_s = parse_duration(sweep.measure)
    watching = Watching(window_s, from_step)
    condition = Condition(sweep.keep)
    condition.root = with_windows(condition.root, window_s)
    stop = target.listen(watching.take)
    try:
        await target.wait_until(target.now + window_s)
    finally:
        stop()
    verdict = condition.test(watching.history)
    _, goal_signal = parse_best(sweep.best)
    goal = watching.history.read(goal_signal, window_s)
    has_enough = verdict.num_samples >= sweep.min_samples and goal is not None
    detail = f"{verdict.detail}; {goal_signal} = {goal.value:.4g}" if goal is not None else verdict.detail
    if verdict.num_samples < sweep.min_samples:
        detail += f", {sweep.min_samples} needed"
    return Trial(
        value=value, keeps=verdict.truth if has_enough else None, goal=goal.value if goal else None, detail=detail
    )
