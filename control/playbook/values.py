"""What a `set` or `sweep` step asks for, worked out: plain values, `initial`, and formulas within their bounds."""

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from schedtop.control.playbook.formula import INITIAL, Formula, Inputs, NoValue, parse_formula
from schedtop.control.playbook.schema import Bounds, Step
from schedtop.control.playbook.target import Target
from schedtop.engine.knobs import KnobSpec, KnobValue
from schedtop.engine.sim.step_model import FittedModel
from schedtop.engine.snapshot import StepRecord

_CONTEXT_WINDOW_S = 30.0


def formula_of(value: KnobValue, spec: KnobSpec) -> Formula | None:
    """The formula that a knob's value is written as; None for a plain value."""
    is_formula = isinstance(value, str) and spec.kind in ("int", "float")
    return parse_formula(value) if is_formula and isinstance(value, str) else None


def known_values(
    wanted: Mapping[str, KnobValue], within: Bounds, initial: Mapping[str, KnobValue], target: Target
) -> dict[str, KnobValue]:
    """Those values that nothing can change any more before their step is done."""
    known: dict[str, KnobValue] = {}
    for name, value in wanted.items():
        formula = formula_of(value, target.specs[name])
        if formula is None or formula.is_known_beforehand:
            known[name] = _resolve(name, value, within, initial, target, None)
    return known


async def resolve(
    wanted: Mapping[str, KnobValue], within: Bounds, initial: Mapping[str, KnobValue], target: Target
) -> dict[str, KnobValue]:
    """All values as of now. Raises `NoValue` where one can't be worked out for lack of data."""
    formulas = [formula_of(value, target.specs[name]) for name, value in wanted.items()]
    needs_model = any(formula.needs_model for formula in formulas if formula is not None)
    fitted = await target.step_model() if needs_model else None
    return {name: _resolve(name, value, within, initial, target, fitted) for name, value in wanted.items()}


def all_sets(steps: list[Step]) -> list[tuple[dict[str, KnobValue], Bounds]]:
    """Every change set that the steps may make: of a sweep, one per value."""
    sets = [(step.set, step.within) for step in steps if step.set is not None]
    return sets + [
        ({step.sweep.knob: value}, Bounds()) for step in steps if step.sweep is not None for value in step.sweep.values
    ]


def _resolve(
    name: str,
    value: KnobValue,
    within: Bounds,
    initial: Mapping[str, KnobValue],
    target: Target,
    fitted: FittedModel | None,
) -> KnobValue:
    spec = target.specs[name]
    if value == INITIAL:
        return initial[name]
    formula = formula_of(value, spec)
    if formula is None:
        return value
    start = initial[name]
    inputs = Inputs(
        initial=float(start) if isinstance(start, int | float) else None,
        ceiling=spec.high,
        history=target.history,
        budget_for=lambda step_s: _budget(step_s, fitted, target),
    )
    try:
        number = formula.compute(inputs)
    except NoValue as error:
        raise NoValue(f"{name}: {formula.text} can't be worked out: {error}") from None
    return _fitting(number, spec, within)


def _fitting(number: float, spec: KnobSpec, within: Bounds) -> KnobValue:
    """A computed value as the knob takes it: inside the playbook's bounds and the knob's range, whole if need be."""
    for low, high in ((within.min, within.max), (spec.low, spec.high)):
        number = number if low is None else max(number, low)
        number = number if high is None else min(number, high)
    return math.floor(number) if spec.kind == "int" else number


def _budget(step_s: float, fitted: FittedModel | None, target: Target) -> int:
    """Tokens of a step of at most `step_s`, today's decodes included.

    A prompt token costs what it attends to as well: as much as for nine of ten steps with prompts in them lately.
    """
    if fitted is None:
        raise NoValue("too few steps were seen to have a step-time model")
    decode_context, context_per_token = _context_of(target.history.recent_steps(_CONTEXT_WINDOW_S))
    model = fitted.model
    model = msgspec.structs.replace(
        model, per_prefill_token_s=model.per_prefill_token_s + context_per_token * model.per_context_token_s
    )
    num_decodes = target.snapshot.num_running
    try:
        return num_decodes + model.budget_for(step_s, num_decodes, decode_context)
    except ValueError as error:
        raise NoValue(str(error)) from None


def _context_of(records: Sequence[StepRecord]) -> tuple[int, float]:
    """Context tokens that decoding attends to in a step, and those that one prompt token does."""
    decoding = [record.num_context_tokens for record in records if not record.num_prefill_tokens]
    decode_context = int(statistics.median(decoding)) if decoding else 0
    per_token = sorted(
        max(0, record.num_context_tokens - decode_context) / record.num_prefill_tokens
        for record in records
        if record.num_prefill_tokens
    )
    return decode_context, per_token[int(0.9 * len(per_token))] if per_token else 0.0
