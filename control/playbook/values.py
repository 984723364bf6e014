"""What a `set` step asks for, worked out: plain values, `initial`, and `budget_for(80ms)` within its bounds."""

from collections.abc import Mapping

import msgspec

from schedtop.control.playbook.schema import INITIAL, Bounds, Step, budget_step_s
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobSpec, KnobValue
from schedtop.engine.sim.step_model import FittedModel
from schedtop.engine.snapshot import Snapshot


def needs_model(step: Step) -> bool:
    """Whether a value has to be computed from the step-time model."""
    return any(budget_step_s(value) is not None for value in (step.set or {}).values())


def is_known_beforehand(value: KnobValue) -> bool:
    """Whether the value is in the file (or is what the knob was at the start)."""
    return budget_step_s(value) is None


def resolve(
    step: Step,
    initial: Mapping[str, KnobValue],
    specs: Mapping[str, KnobSpec],
    fitted: FittedModel | None,
    snapshot: Snapshot,
) -> dict[str, KnobValue]:
    """The knobs that a step sets. Raises `SchedtopError` when a value can't be worked out."""
    resolved: dict[str, KnobValue] = {}
    for name, value in (step.set or {}).items():
        if value == INITIAL:
            value = initial[name]
        elif (step_s := budget_step_s(value)) is not None:
            value = _budget(step_s, specs[name], fitted, snapshot)
        resolved[name] = _clamped(value, step.within)
    return resolved


def _budget(step_s: float, spec: KnobSpec, fitted: FittedModel | None, snapshot: Snapshot) -> int:
    """Tokens of a step of at most `step_s`, today's decodes included, as far as this engine's range goes."""
    if fitted is None:
        raise SchedtopError("budget_for needs a step-time model, and too few steps were seen to have one")
    num_decodes = snapshot.num_running
    try:
        wanted = num_decodes + fitted.model.budget_for(step_s, num_decodes)
    except ValueError as error:
        raise SchedtopError(str(error)) from None
    low, high = spec.low or 1, spec.high if spec.high is not None else wanted
    return int(min(max(wanted, low), high))


def _clamped(value: KnobValue, bounds: Bounds) -> KnobValue:
    if isinstance(value, bool | str):
        return value
    if bounds.min is not None:
        value = max(value, type(value)(bounds.min))
    if bounds.max is not None:
        value = min(value, type(value)(bounds.max))
    return value


def knob_values(snapshot: Snapshot) -> dict[str, KnobValue]:
    """All knobs by name, as the wire writes them."""
    values: dict[str, KnobValue] = msgspec.to_builtins(snapshot.knobs)
    return values
