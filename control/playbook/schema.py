"""The playbook file: YAML, strict. Every error names file, line and column and says what would be right.

Decoding only; what a playbook does is `runner.py`'s.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from schedtop.control.playbook.expr import BadExpression, Condition, parse_duration
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KNOB_NAMES, KnobValue

_Path = tuple[str | int, ...]
_BUDGET_FOR = re.compile(r"budget_for\(\s*(?P<duration>[0-9.]+\s*(?:ms|s))\s*\)")
INITIAL = "initial"
"""Instead of a value: what the knob was when the playbook started."""


class BadPlaybook(SchedtopError):
    """A playbook file that can't be used."""

    code = "bad_playbook"


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits for a computed value."""

    min: float | None = None
    max: float | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to do: exactly one of `set`, `wait`, `pause`, `resume`, `drain`; `when` makes it conditional."""

    set: dict[str, KnobValue] | None = None
    within: Bounds = Bounds()
    wait: str | None = None
    pause: str | None = None
    resume: bool | None = None
    drain: str | None = None
    when: str | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold afterwards, and what to do if it doesn't or if nobody knows."""

    expect: str
    min_samples: int = 1
    on_fail: str = "rollback"
    on_no_data: str = "hold"


class Playbook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"last": "finally"}):
    """A whole file."""

    name: str
    steps: list[Step]
    description: str = ""
    when: str | None = None
    cooldown: str = "30s"
    checks: list[Check] = []
    last: list[Step] = []


def load_playbook(path: Path) -> Playbook:
    """Read and check a playbook. Raises `BadPlaybook`."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPlaybook(f"{path}: {error}") from None
    return parse_playbook(text, str(path))


def parse_playbook(text: str, name: str) -> Playbook:
    """Decode and check; `name` is the file's name in errors. Raises `BadPlaybook`."""
    return _Reader(name).read(text)


class _Reader:
    """Decodes one file, remembering where in it each value stands."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._marks: dict[_Path, yaml.Mark] = {}

    def read(self, text: str) -> Playbook:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
            raise BadPlaybook(f"{self._name}:{where}: {error.problem or error.context}") from None
        if root is None:
            raise BadPlaybook(f"{self._name}:1:1: the file is empty; a playbook needs at least name and steps")
        data = self._plain(root, ())
        try:
            playbook = msgspec.convert(data, Playbook)
        except msgspec.ValidationError as error:
            raise self._located(error) from None
        self._check(playbook)
        return playbook

    def _plain(self, node: yaml.Node, path: _Path) -> Any:
        """The value of a node; notes the place of each."""
        self._marks[path] = node.start_mark
        match node:
            case yaml.MappingNode():
                result: dict[str, Any] = {}
                for key_node, value_node in node.value:
                    key = str(key_node.value)
                    if key in result:
                        raise self._error((*path, key), f"{key!r} stands twice", key_node.start_mark)
                    result[key] = self._plain(value_node, (*path, key))
                    self._marks[(*path, key, "<key>")] = key_node.start_mark
                return result
            case yaml.SequenceNode():
                return [self._plain(item, (*path, index)) for index, item in enumerate(node.value)]
            case _:
                return yaml.SafeLoader("").construct_object(node)

    def _check(self, playbook: Playbook) -> None:
        if playbook.when is not None:
            self._condition(playbook.when, ("when",))
        self._duration(playbook.cooldown, ("cooldown",))
        for place, steps in (("steps", playbook.steps), ("finally", playbook.last)):
            for index, step in enumerate(steps):
                self._check_step(step, (place, index))
        for index, check in enumerate(playbook.checks):
            self._check_check(check, ("checks", index))

    def _check_step(self, step: Step, path: _Path) -> None:
        actions = [name for name in ("set", "wait", "pause", "resume", "drain") if getattr(step, name) is not None]
        if len(actions) != 1:
            found = f"has {' and '.join(actions)}" if actions else "has none"
            raise self._error(path, f"a step does exactly one of set, wait, pause, resume, drain; this one {found}")
        for name in ("wait", "drain"):
            if (duration := getattr(step, name)) is not None:
                self._duration(duration, (*path, name))
        if step.when is not None:
            self._condition(step.when, (*path, "when"))
        if step.pause not in (None, "abort", "wait", "keep"):
            raise self._error((*path, "pause"), f"pause has the modes abort, wait and keep, not {step.pause!r}")
        for knob, value in (step.set or {}).items():
            self._check_knob(knob, value, (*path, "set", knob))

    def _check_knob(self, knob: str, value: KnobValue, path: _Path) -> None:
        if knob not in KNOB_NAMES:
            close = difflib.get_close_matches(knob, KNOB_NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise self._error(path, f"no knob is called {knob!r}{hint}", self._marks.get((*path, "<key>")))
        if isinstance(value, str) and value.startswith("budget_for") and budget_step_s(value) is None:
            raise self._error(path, f"can't read {value!r}; write budget_for(80ms)")

    def _check_check(self, check: Check, path: _Path) -> None:
        self._condition(check.expect, (*path, "expect"))
        for name in ("on_fail", "on_no_data"):
            if (value := getattr(check, name)) not in ("rollback", "hold", "ignore"):
                raise self._error((*path, name), f"{name} is rollback, hold or ignore, not {value!r}")
        if check.min_samples < 1:
            raise self._error((*path, "min_samples"), f"min_samples={check.min_samples} is below its minimum 1")

    def _condition(self, text: str, path: _Path) -> None:
        try:
            Condition(text)
        except BadExpression as error:
            raise self._error(path, str(error), offset=error.column - 1) from None

    def _duration(self, text: str, path: _Path) -> None:
        try:
            parse_duration(text)
        except BadExpression as error:
            raise self._error(path, str(error)) from None

    def _located(self, error: msgspec.ValidationError) -> BadPlaybook:
        message, _, where = str(error).partition(" - at `")
        path: _Path = tuple(
            int(part[1:-1]) if part.startswith("[") else part.lstrip(".")
            for part in re.findall(r"\[\d+\]|\.?\w+", where.rstrip("`").removeprefix("$"))
        )
        if unknown := re.search(r"unknown field `(\w+)`", message):
            field = unknown.group(1)
            known = {**dict.fromkeys(Playbook.__struct_encode_fields__), **dict.fromkeys(Step.__struct_encode_fields__)}
            close = difflib.get_close_matches(field, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            return self._error(path, f"unknown field {field!r}{hint}", self._marks.get((*path, field, "<key>")))
        return self._error(path, message)

    def _error(self, path: _Path, message: str, mark: yaml.Mark | None = None, offset: int = 0) -> BadPlaybook:
        while mark is None and path not in self._marks:
            path = path[:-1]
        mark = mark or self._marks[path]
        return BadPlaybook(f"{self._name}:{mark.line + 1}:{mark.column + 1 + offset}: {message}")


def budget_step_s(value: KnobValue) -> float | None:
    """The step time of `budget_for(80ms)` in seconds; None for any other value."""
    match = _BUDGET_FOR.fullmatch(value) if isinstance(value, str) else None
    return parse_duration(match["duration"].replace(" ", "")) if match else None
