"""Values staged for knobs before they are applied: how + and - step, how typed text is read. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace

from schedtop.engine.errors import KnobRefused
from schedtop.engine.knobs import Knobs, KnobSpec, KnobValue
from schedtop.tui.format import value_text
from schedtop.tui.state import Ui

_WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


def stepped(spec: KnobSpec, value: KnobValue, direction: int) -> KnobValue:
    """The next value up (+1) or down (-1), inside the range; choices and switches go round.

    >>> spec = KnobSpec(name="n", unit="", kind="int", summary="", low=1, high=8192, default=1)
    >>> stepped(spec, 2048, 1), stepped(spec, 2048, -1), stepped(spec, 8192, 1), stepped(spec, 3, -1)
    (2304, 1920, 8192, 2)
    """
    if spec.kind == "bool":
        return not value
    if spec.kind == "choice":
        return spec.choices[(spec.choices.index(str(value)) + direction) % len(spec.choices)]
    number = float(value)
    size = 0.01 if spec.kind == "float" else float(_int_step(int(number) - (direction < 0)))
    new = number + direction * size
    if spec.low is not None:
        new = max(spec.low, new)
    if spec.high is not None:
        new = min(spec.high, new)
    return round(new, 6) if spec.kind == "float" else int(new)


def _int_step(value: int) -> int:
    step = 1
    while step * 16 <= value:
        step *= 2
    return step


def parsed(spec: KnobSpec, text: str) -> KnobValue:
    """What was typed for `spec`. Raises `KnobRefused` naming the text and what would do."""
    word = text.strip().lower()
    if spec.kind == "bool":
        if word not in _WORDS:
            raise KnobRefused(f"{spec.name}: {text!r} is neither on nor off")
        return _WORDS[word]
    if spec.kind == "choice":
        found = [choice for choice in spec.choices if choice.startswith(word)]
        if word not in spec.choices and len(found) != 1:
            raise KnobRefused(f"{spec.name}: {text!r} is not one of {', '.join(spec.choices)}")
        return word if word in spec.choices else found[0]
    try:
        return int(word.replace("_", "").replace(",", "")) if spec.kind == "int" else float(word)
    except ValueError:
        kind = "a whole number" if spec.kind == "int" else "a number"
        raise KnobRefused(f"{spec.name}: {text!r} is not {kind} ({range_text(spec)})") from None


def problem(spec: KnobSpec, value: KnobValue) -> str:
    """Why the engine would refuse `value`, as far as the screen can tell; empty when it looks right."""
    if spec.kind in ("bool", "choice"):
        return ""
    if spec.low is not None and float(value) < spec.low:
        return f"below its minimum {spec.low:g}"
    if spec.high is not None and float(value) > spec.high:
        return f"above its ceiling {spec.high:g}"
    return ""


def range_text(spec: KnobSpec) -> str:
    """The legal values: `1 to 8192 tokens/step`, `fcfs | priority`, `on | off`."""
    if spec.kind == "bool":
        return "on | off"
    if spec.kind == "choice":
        return " | ".join(spec.choices)
    low = "" if spec.low is None else value_text(float(spec.low))
    high = "no limit" if spec.high is None else value_text(int(spec.high) if spec.high == int(spec.high) else spec.high)
    return f"{low} to {high} {spec.unit}".strip()


_LOG_FROM = 100.0
"""Ranges wider than this (high to low) are laid out by ratio, not by difference."""


def can_slide(spec: KnobSpec) -> bool:
    """Whether a knob is a number with two ends."""
    return spec.kind in ("int", "float") and spec.low is not None and spec.high is not None and spec.high > spec.low


def share_of(spec: KnobSpec, value: float) -> float:
    """Where `value` lies on the slider, 0 to 1.

    >>> spec = KnobSpec(name="n", unit="", kind="int", summary="", low=1, high=8192, default=1)
    >>> share_of(spec, 1), round(share_of(spec, 127), 2), share_of(spec, 8192), share_of(spec, 99999)
    (0.0, 0.5, 1.0, 1.0)
    """
    low, high = _ends(spec)
    return min(1.0, max(0.0, (_laid_out(spec, value) - low) / (high - low)))


def value_at(spec: KnobSpec, share: float) -> KnobValue:
    """The value at a place of the slider; the inverse of `share_of`.

    >>> spec = KnobSpec(name="n", unit="", kind="int", summary="", low=1, high=8192, default=1)
    >>> value_at(spec, 0.0), value_at(spec, 0.5), value_at(spec, 1.0), value_at(spec, 2.0)
    (1, 127, 8192, 8192)
    """
    low, high = _ends(spec)
    place = low + (high - low) * min(1.0, max(0.0, share))
    value = math.expm1(place) if _is_wide(spec) else place
    return round(value, 2) if spec.kind == "float" else round(value)


def _is_wide(spec: KnobSpec) -> bool:
    return float(spec.high or 0) / max(1.0, float(spec.low or 0)) >= _LOG_FROM


def _laid_out(spec: KnobSpec, value: float) -> float:
    return math.log1p(max(0.0, value)) if _is_wide(spec) else value


def _ends(spec: KnobSpec) -> tuple[float, float]:
    return _laid_out(spec, float(spec.low or 0)), _laid_out(spec, float(spec.high or 0))


def slid(ui: Ui, specs: Sequence[KnobSpec], live: Knobs, direction: int) -> Ui:
    """`ui` with the selected knob moved a twentieth of its slider, at least one step."""
    spec = current(ui, specs)
    if spec is None or not can_slide(spec):
        return turned(ui, specs, live, direction)
    now = float(ui.staged.get(spec.name, getattr(live, spec.name)))
    new = value_at(spec, share_of(spec, now) + direction / _SLIDER_STEPS)
    if (float(new) - now) * direction <= 0:
        new = stepped(spec, spec_value(spec, now), direction)
    return staged(ui, spec, new, live)


_SLIDER_STEPS = 20


def spec_value(spec: KnobSpec, value: float) -> KnobValue:
    """A number as the knob's own kind."""
    return value if spec.kind == "float" else int(value)


def current(ui: Ui, specs: Sequence[KnobSpec]) -> KnobSpec | None:
    """The selected knob."""
    return specs[ui.knob % len(specs)] if specs else None


def turned(ui: Ui, specs: Sequence[KnobSpec], live: Knobs, direction: int) -> Ui:
    """`ui` with the selected knob's staged value one step on; a value equal to the live one is no longer staged."""
    spec = current(ui, specs)
    if spec is None:
        return ui
    now = ui.staged.get(spec.name, getattr(live, spec.name))
    return staged(ui, spec, stepped(spec, now, direction), live)


def staged(ui: Ui, spec: KnobSpec, value: KnobValue, live: Knobs) -> Ui:
    """`ui` with `value` staged for `spec`."""
    rest = {name: old for name, old in ui.staged.items() if name != spec.name}
    if value != getattr(live, spec.name):
        rest[spec.name] = value
    return replace(ui, staged=rest, entry="")


def entered(ui: Ui, specs: Sequence[KnobSpec], live: Knobs) -> Ui:
    """`ui` with the typed value staged. Raises `KnobRefused` when it can't be read."""
    spec = current(ui, specs)
    return staged(ui, spec, parsed(spec, ui.entry), live) if spec else replace(ui, entry="")
