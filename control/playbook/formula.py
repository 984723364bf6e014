"""What a knob's value may be computed from: `initial`, `ceiling`, signals, `budget_for(80ms)`, and arithmetic.

    ceiling / 4        running * 0.75 + 1        budget_for(80ms)

Parsed by a library at load, worked out when the step is done, never evaluated as code. A signal without data gives no
value, and no value is never guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import VisitError

from schedtop.control.playbook.expr import BadExpression, parse_duration, signal_named
from schedtop.control.playbook.signals import SignalHistory
from schedtop.engine.errors import SchedtopError

_GRAMMAR = r"""
?start: sum
?sum: product | sum "+" product -> plus | sum "-" product -> minus
?product: atom | product "*" atom -> times | product "/" atom -> divided
?atom: NUMBER -> number | budget | NAME -> name | "(" sum ")"
budget: "budget_for" "(" DURATION ")"
DURATION.2: /[0-9.]+\s*(ms|s)\b/
NAME: /(?!budget_for\b)[a-z_][a-z0-9_]*/
%import common.NUMBER
%import common.WS
%ignore WS
"""
INITIAL, CEILING = "initial", "ceiling"


class NoValue(SchedtopError):
    """A value that can't be worked out for lack of data."""

    code = "no_data"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a formula may look at. `initial` is None for a knob that isn't a number."""

    initial: float | None
    ceiling: float | None
    history: SignalHistory
    budget_for: Callable[[float], int]
    """Step time in seconds to token budget; raises `NoValue`."""


Node = Callable[[Inputs], float]


@dataclass(frozen=True, slots=True)
class Formula:
    """A parsed formula."""

    text: str
    compute: Node
    """Raises `NoValue`."""
    names: frozenset[str]
    """Signals and `budget_for`, `initial`, `ceiling`, as far as it uses them."""

    @property
    def is_known_beforehand(self) -> bool:
        """Whether nothing that happens meanwhile changes its value."""
        return self.names <= {INITIAL, CEILING}

    @property
    def needs_model(self) -> bool:
        """Whether the step-time model is asked."""
        return "budget_for" in self.names


def parse_formula(text: str) -> Formula:
    """Parse and check names. Raises `BadExpression` with the column."""
    builder = _Builder()
    try:
        compute = builder.transform(_PARSER.parse(text))
    except UnexpectedInput as error:
        column = max(1, error.column)
        raise BadExpression(
            f"can't read {text!r} from column {column} on: write a number, `initial`, `ceiling / 2`, "
            "`running * 0.75` or budget_for(80ms)", column,
        ) from None  # fmt: skip
    except VisitError as error:
        if isinstance(error.orig_exc, BadExpression):
            raise error.orig_exc from None
        raise
    return Formula(text, compute, frozenset(builder.names))


@v_args(inline=True)
class _Builder(Transformer[Token, Any]):
    """Turns the parse tree into closures, noting the names used."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def number(self, value: Token) -> Node:
        return lambda inputs: float(value)

    def name(self, token: Token) -> Node:
        name = str(token)
        if name not in (INITIAL, CEILING):
            signal_named(token)
        self.names.add(name)
        return lambda inputs: _look_up(name, inputs)

    def budget(self, duration: Token) -> Node:
        seconds = parse_duration("".join(duration.split()))
        if seconds <= 0:
            raise BadExpression(f"a step of {duration} is impossible: give a time above 0", duration.column or 1)
        self.names.add("budget_for")
        return lambda inputs: inputs.budget_for(seconds)

    def plus(self, left: Node, right: Node) -> Node:
        return lambda inputs: left(inputs) + right(inputs)

    def minus(self, left: Node, right: Node) -> Node:
        return lambda inputs: left(inputs) - right(inputs)

    def times(self, left: Node, right: Node) -> Node:
        return lambda inputs: left(inputs) * right(inputs)

    def divided(self, left: Node, right: Node) -> Node:
        return lambda inputs: _quotient(left(inputs), right(inputs))


def _look_up(name: str, inputs: Inputs) -> float:
    fixed: Mapping[str, float | None] = {INITIAL: inputs.initial, CEILING: inputs.ceiling}
    if name in fixed:
        value = fixed[name]
        if value is None:
            raise NoValue(f"this knob has no {name} that could be reckoned with")
        return value
    reading = inputs.history.read(name)
    if reading is None:
        raise NoValue(f"{name} has no data")
    return reading.value


def _quotient(left: float, right: float) -> float:
    if right == 0:
        raise NoValue("it divides by 0")
    return left / right


_PARSER = Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)
