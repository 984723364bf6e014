"""The playbooks' expression language: comparisons of signals over time, joined by and, or, not. Parsed, never evaluated
as code.

    itl_p99_ms > 80 for 5s and running >= 4
    ttft_p95_ms < 2s over 30s

`over D` takes the signal over the last D; `for D` asks that the comparison has held for D without a break; both may
stand, in this order. A signal without data makes a comparison unknown, and unknown is neither true nor false.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import VisitError

from schedtop.control.playbook.signals import DEFAULT_WINDOW_S, KEPT_S, SIGNALS, SignalHistory, SignalSpec

_GRAMMAR = r"""
?start: either
?either: both ("or" both)*          -> either
?both: single ("and" single)*       -> both
?single: "not" single               -> negation
       | "(" either ")"
       | comparison
comparison: NAME OP quantity over? held?
over: OVER duration
held: FOR duration
quantity: NUMBER UNIT?
duration: NUMBER UNIT
FOR: "for"
OVER: "over"
OP: "<=" | ">=" | "==" | "!=" | "<" | ">"
UNIT: "ms" | "s" | "m" | "h" | "%"
NAME: /(?!(and|or|not|for|over)\b)[a-z_][a-z0-9_]*/
%import common.NUMBER
%import common.WS
%ignore WS
"""
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class BadExpression(ValueError):
    """What is wrong, and at which column (from 1) of the expression."""

    def __init__(self, message: str, column: int = 1) -> None:
        super().__init__(message)
        self.column = column


@dataclass(frozen=True, slots=True)
class Verdict:
    """True, False, or None where data is missing; `detail` gives the readings behind it."""

    truth: bool | None
    detail: str
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """`signal op limit`, over a window, or held for a time. The limit is in the signal's own unit."""

    signal: str
    op: str
    limit: float
    over_s: float | None = None
    held_s: float | None = None

    def test(self, history: SignalHistory) -> Verdict:
        """Compare now; `for` is the business of `Condition`, which remembers."""
        reading = history.read(self.signal, self.over_s)
        if reading is None:
            return Verdict(None, f"{self.signal}: no data")
        unit = SIGNALS[self.signal].unit
        detail = f"{self.signal} = {reading.value:.4g} {unit} ({reading.num_samples} samples)"
        return Verdict(_compare(reading.value, self.op, self.limit), detail, reading.num_samples)


@dataclass(frozen=True, slots=True)
class Both:
    """All parts hold."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """At least one part holds."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Negation:
    """The part doesn't hold."""

    part: "Node"


Node = Comparison | Both | Either | Negation


class Condition:
    """A parsed expression with the memory that `for` needs: since when each comparison has held."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.root = parse(text)
        self._held_since: dict[Comparison, float] = {}

    def test(self, history: SignalHistory) -> Verdict:
        """The verdict now. Call it at least once a second while watching."""
        return self._test(self.root, history)

    @property
    def longest_window_s(self) -> float:
        """Seconds of data the expression needs."""
        return max(leaf.over_s or DEFAULT_WINDOW_S for leaf in comparisons(self.root))

    def _test(self, node: Node, history: SignalHistory) -> Verdict:
        match node:
            case Comparison():
                return self._test_comparison(node, history)
            case Negation():
                inner = self._test(node.part, history)
                return Verdict(None if inner.truth is None else not inner.truth, inner.detail, inner.num_samples)
            case Both() | Either():
                verdicts = [self._test(part, history) for part in node.parts]
                return _joined(verdicts, decisive=isinstance(node, Either))

    def _test_comparison(self, node: Comparison, history: SignalHistory) -> Verdict:
        verdict = node.test(history)
        if node.held_s is None:
            return verdict
        if verdict.truth is not True:
            self._held_since.pop(node, None)
            return verdict
        since = self._held_since.setdefault(node, history.now)
        held = history.now - since
        return Verdict(held >= node.held_s, f"{verdict.detail}, held {held:.0f} s", verdict.num_samples)


def parse(text: str) -> Node:
    """Parse and check an expression. Raises `BadExpression` with the column."""
    try:
        node = _Builder(text).transform(_PARSER.parse(text))
    except UnexpectedInput as error:
        raise BadExpression(f"can't read {text!r} from column {error.column} on", max(1, error.column)) from None
    except VisitError as error:
        if isinstance(error.orig_exc, BadExpression):
            raise error.orig_exc from None
        raise
    assert isinstance(node, Comparison | Both | Either | Negation)
    return node


def parse_duration(text: str) -> float:
    """`500ms`, `5s`, `2m`, `1h` in seconds. Raises `BadExpression`."""
    for unit in ("ms", "s", "m", "h"):
        number = text.strip().removesuffix(unit)
        if number != text.strip():
            try:
                seconds = float(number) * _SECONDS[unit]
            except ValueError:
                break
            if seconds >= 0:
                return seconds
    raise BadExpression(f"{text!r} is no duration: write 500ms, 5s, 2m or 1h")


def comparisons(node: Node) -> list[Comparison]:
    """All comparisons of an expression."""
    match node:
        case Comparison():
            return [node]
        case Negation():
            return comparisons(node.part)
        case _:
            return [leaf for part in node.parts for leaf in comparisons(part)]


def with_windows(node: Node, seconds: float) -> Node:
    """The same expression, every signal without a window of its own taken over so many seconds."""
    match node:
        case Comparison():
            return replace(node, over_s=node.over_s or seconds)
        case Negation():
            return Negation(with_windows(node.part, seconds))
        case _:
            return type(node)(tuple(with_windows(part, seconds) for part in node.parts))


def _joined(verdicts: list[Verdict], decisive: bool) -> Verdict:
    """Kleene's and (`decisive` False) and or (True): one decisive part settles it, else unknown wins."""
    detail = "; ".join(verdict.detail for verdict in verdicts)
    num_samples = min(verdict.num_samples for verdict in verdicts)
    truths = [verdict.truth for verdict in verdicts]
    if decisive in truths:
        return Verdict(decisive, detail, num_samples)
    return Verdict(None if None in truths else not decisive, detail, num_samples)


def _compare(value: float, op: str, limit: float) -> bool:
    match op:
        case "<":
            return value < limit
        case "<=":
            return value <= limit
        case ">":
            return value > limit
        case ">=":
            return value >= limit
        case "==":
            return value == limit
        case _:
            return value != limit


@v_args(inline=True)
class _Builder(Transformer[Token, Any]):
    """Turns the parse tree into nodes, checking names and units."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def either(self, *parts: Node) -> Node:
        return parts[0] if len(parts) == 1 else Either(parts)

    def both(self, *parts: Node) -> Node:
        return parts[0] if len(parts) == 1 else Both(parts)

    def negation(self, part: Node) -> Node:
        return Negation(part)

    def quantity(self, number: Token, unit: Token | None = None) -> tuple[Token, Token | None]:
        return number, unit

    def duration(self, number: Token, unit: Token) -> tuple[float, int]:
        column = number.column or 1
        if unit not in _SECONDS:
            raise BadExpression(f"{number}{unit} is no duration: write 500ms, 5s, 2m or 1h", column)
        seconds = float(number) * _SECONDS[unit]
        if not 0 < seconds <= KEPT_S:
            limits = f"above 0, at most {KEPT_S:g}s"
            raise BadExpression(f"a window of {number}{unit} is outside its range: {limits}", column)
        return seconds, column

    def held(self, _: Token, duration: tuple[float, int]) -> tuple[str, float]:
        return "held_s", duration[0]

    def over(self, _: Token, duration: tuple[float, int]) -> tuple[str, float]:
        return "over_s", duration[0]

    def comparison(
        self, name: Token, op: Token, quantity: tuple[Token, Token | None], *spans: tuple[str, float]
    ) -> Comparison:
        spec = signal_named(name)
        limit = _in_unit_of(spec.unit, *quantity)
        _check_possible(spec, str(op), limit, quantity[0].column or 1)
        windows = dict(spans)
        return Comparison(str(name), str(op), limit, windows.get("over_s"), windows.get("held_s"))


def signal_named(name: Token) -> SignalSpec:
    """The signal of that name. Raises `BadExpression` with the nearest one."""
    spec = SIGNALS.get(str(name))
    if spec is None:
        close = difflib.get_close_matches(str(name), SIGNALS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; docs/reference/signals.md lists them"
        raise BadExpression(f"there is no signal called {str(name)!r}{hint}", name.column or 1)
    return spec


def _check_possible(spec: SignalSpec, op: str, limit: float, column: int) -> None:
    """Raise `BadExpression` for a comparison that no value of the signal, or every one, makes true."""
    if spec.unit == "share" and limit > 1:
        raise BadExpression(f"{spec.name} is a share from 0 to 1, {limit:g} is impossible: write 0.9 or 90%", column)
    if limit == 0 and op in ("<", ">="):
        always = "never" if op == "<" else "always"
        raise BadExpression(f"{spec.name} is never below 0, so `{op} 0` is {always} true: write > 0 or == 0", column)


def _in_unit_of(signal_unit: str, number: Token, unit: Token | None) -> float:
    value, column = float(number), number.column or 1
    if unit is None:
        return value
    if unit == "%" and signal_unit == "share":
        return value / 100
    if unit in _SECONDS and signal_unit == "ms":
        return value * _SECONDS[unit] * 1e3
    right = {"ms": "ms, s, m or h", "share": "%"}.get(signal_unit, "a number without a unit")
    raise BadExpression(f"{number}{unit} doesn't fit a signal in {signal_unit}: give {right}", column)


_PARSER = Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)
