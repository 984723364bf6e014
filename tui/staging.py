"""Values staged for knobs before they are applied: how + and - step, how typed text is read. Pure."""

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
