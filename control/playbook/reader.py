"""Reads a playbook file: YAML, strict. Every error names file, line and column and says what would be right.

What may stand in a file is `schema.py`'s. A file may come from anybody (a request's body): nothing in it is run, opened
or expanded without bound.
"""

import difflib
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml
from lark import Token

from schedtop.control.playbook.expr import BadExpression, Condition, parse_duration, signal_named
from schedtop.control.playbook.formula import INITIAL, parse_formula
from schedtop.control.playbook.schedule import parse_schedule, parse_zone
from schedtop.control.playbook.schema import ACTIONS, OUTCOMES, PAUSE_MODES, Check, Playbook, Step, Sweep
from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import KnobRefused, SchedtopError
from schedtop.engine.knobs import ALLOCATED_KNOBS, KNOB_NAMES, Knobs, KnobSpec, KnobValue, change_knobs, knob_table

MAX_BYTES = 64 << 10
MAX_NODES = 5000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
_BEST = re.compile(r"\s*(?P<direction>lowest|highest)\s+(?P<signal>[a-z_0-9]+)\s*")
_TABLE = tuple(
    msgspec.structs.replace(spec, high=None) if spec.name in ALLOCATED_KNOBS else spec
    for spec in knob_table(EngineConfig())
)
"""The knobs of any engine: without the ceilings, which are each engine's own."""
_SPECS = {spec.name: spec for spec in _TABLE}

_Path = tuple[str | int, ...]


class BadPlaybook(SchedtopError):
    """A playbook file that can't be used."""

    code = "bad_playbook"


def load_playbook(path: Path) -> Playbook:
    """Read and check a playbook. Raises `BadPlaybook`."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPlaybook(f"{path}: {error}") from None
    return parse_playbook(text, str(path))


def parse_playbook(text: str, name: str) -> Playbook:
    """Decode and check; `name` is the file's name in errors. Raises `BadPlaybook`."""
    if len(text) > MAX_BYTES:
        raise BadPlaybook(f"{name}:1:1: {len(text)} characters are no playbook: the limit is {MAX_BYTES}")
    try:
        return _Reader(name).read(text)
    except RecursionError:
        raise BadPlaybook(f"{name}:1:1: the file is nested too deeply to be read") from None


def parse_best(text: str) -> tuple[bool, str]:
    """`lowest ttft_p95_ms`: (whether higher is better, signal). Raises `BadExpression`."""
    match = _BEST.fullmatch(text)
    if match is None:
        raise BadExpression(f"{text!r} names no goal: write `lowest SIGNAL` or `highest SIGNAL`")
    signal_named(Token("NAME", match["signal"], column=match.start("signal") + 1))
    return match["direction"] == "highest", match["signal"]


def spec_of(knob: str) -> KnobSpec:
    """A knob's description without any engine's ceiling."""
    return _SPECS[knob]


class _Reader:
    """Decodes one file, remembering where in it each value stands."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._marks: dict[_Path, yaml.Mark] = {}
        self._quoted: set[_Path] = set()
        """Where a text begins after a quote."""
        self._blocks: set[_Path] = set()
        """Where a text begins somewhere below: no column in it can be told."""
        self._num_nodes = 0

    def read(self, text: str) -> Playbook:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            if root is None:
                raise BadPlaybook(f"{self._name}:1:1: the file is empty; a playbook needs at least name and steps")
            data = self._plain(root, ())
        except yaml.MarkedYAMLError as error:
            raise self._unreadable(error) from None
        except yaml.YAMLError as error:
            raise BadPlaybook(f"{self._name}:1:1: {error}") from None
        try:
            playbook = msgspec.convert(data, Playbook)
        except msgspec.ValidationError as error:
            raise self._located(error) from None
        self._check(playbook)
        return playbook

    def _unreadable(self, error: yaml.MarkedYAMLError) -> BadPlaybook:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        return BadPlaybook(f"{self._name}:{where}: {error.problem or error.context}")

    def _plain(self, node: yaml.Node, path: _Path) -> Any:
        """The value of a node; notes the place of each."""
        self._marks[path] = node.start_mark
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:  # an alias of an alias of an alias grows without bound
            raise self._error(path, f"more than {MAX_NODES} values, aliases counted each time they stand")
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path)
            case yaml.SequenceNode():
                return [self._plain(item, (*path, index)) for index, item in enumerate(node.value)]
            case _:
                assert isinstance(node, yaml.ScalarNode)
                return self._scalar(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: _Path) -> Any:
        if node.style in ("|", ">"):
            self._blocks.add(path)
        elif node.style is not None:
            self._quoted.add(path)
        try:
            return yaml.SafeLoader("").construct_object(node)
        except ValueError as error:
            raise self._error(path, f"can't read {node.value!r}: {error}") from None

    def _mapping(self, node: yaml.MappingNode, path: _Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in result:
                raise self._error((*path, key), f"{key!r} stands twice; keep one", key_node.start_mark)
            result[key] = self._plain(value_node, (*path, key))
            self._marks[(*path, key, "<key>")] = key_node.start_mark
        return result

    # ---- what types can't say -------------------------------------------------------------------------------

    def _check(self, playbook: Playbook) -> None:
        if not _NAME.fullmatch(playbook.name):
            raise self._error(
                ("name",), f"{playbook.name!r} is no name: 1 to 48 letters, digits, dots, dashes, underscores"
            )
        if not playbook.steps:
            raise self._error(("steps",), "there is nothing to do: give at least one step")
        if playbook.when is not None:
            self._condition(playbook.when, ("when",))
        if playbook.schedule is not None:
            self._try(lambda: parse_schedule(playbook.schedule or ""), ("schedule",))
        self._try(lambda: parse_zone(playbook.timezone), ("timezone",))
        self._duration(playbook.cooldown, ("cooldown",))
        for place, steps in (("steps", playbook.steps), ("finally", playbook.last)):
            for index, step in enumerate(steps):
                self._check_step(step, (place, index))
        for index, check in enumerate(playbook.checks):
            self._check_check(check, ("checks", index))

    def _check_step(self, step: Step, path: _Path) -> None:
        actions = [name for name in ACTIONS if getattr(step, name) is not None]
        if len(actions) != 1:
            found = f"has {' and '.join(actions)}" if actions else "has none"
            raise self._error(path, f"a step does exactly one of {', '.join(ACTIONS)}; this one {found}")
        for name in ("wait", "drain"):
            if (duration := getattr(step, name)) is not None:
                self._duration(duration, (*path, name))
        if step.when is not None:
            self._condition(step.when, (*path, "when"))
        if step.pause not in (None, *PAUSE_MODES):
            raise self._error((*path, "pause"), f"pause has the modes abort, wait and keep, not {step.pause!r}")
        if step.resume is False:
            raise self._error((*path, "resume"), "write `resume: true`, or pause instead")
        if step.set is not None:
            self._check_set(step, path)
        if step.sweep is not None:
            self._check_sweep(step.sweep, (*path, "sweep"))

    def _check_set(self, step: Step, path: _Path) -> None:
        if not step.set:
            raise self._error((*path, "set"), "no knob is named: write `set: {max_num_seqs: 32}`")
        low, high = step.within.min, step.within.max
        if low is not None and high is not None and low > high:
            raise self._error((*path, "within"), f"min {low:g} is above max {high:g}: nothing is within")
        for knob, value in step.set.items():
            self._check_knob(knob, value, (*path, "set", knob))

    def _check_sweep(self, sweep: Sweep, path: _Path) -> None:
        self._check_name(sweep.knob, (*path, "knob"))
        if not sweep.values:
            raise self._error((*path, "values"), "there is nothing to try: give values")
        for index, value in enumerate(sweep.values):
            self._check_value(sweep.knob, value, (*path, "values", index))
        for name in ("settle", "measure"):
            self._duration(getattr(sweep, name), (*path, name))
        self._condition(sweep.keep, (*path, "keep"))
        self._try(lambda: parse_best(sweep.best), (*path, "best"))

    def _check_knob(self, knob: str, value: KnobValue, path: _Path) -> None:
        self._check_name(knob, path, self._marks.get((*path, "<key>")))
        self._check_value(knob, value, path)

    def _check_name(self, knob: str, path: _Path, mark: yaml.Mark | None = None) -> None:
        if knob not in KNOB_NAMES:
            close = difflib.get_close_matches(knob, KNOB_NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; `schedtop knobs` lists them all"
            raise self._error(path, f"no knob is called {knob!r}{hint}", mark)

    def _check_value(self, knob: str, value: KnobValue, path: _Path) -> None:
        """Whatever can be said of a value without an engine: its kind, its lower end, a formula's names."""
        if value == INITIAL:
            return
        if isinstance(value, str) and spec_of(knob).kind in ("int", "float"):
            self._try(lambda: parse_formula(value), path)
            return
        try:
            change_knobs(Knobs(), {knob: value}, _TABLE)
        except KnobRefused as error:
            raise self._error(path, str(error)) from None

    def _check_check(self, check: Check, path: _Path) -> None:
        self._condition(check.expect, (*path, "expect"))
        for name in ("on_fail", "on_no_data"):
            if (value := getattr(check, name)) not in OUTCOMES:
                raise self._error((*path, name), f"{name} is rollback, hold or ignore, not {value!r}")
        for name in ("min_samples", "max_errors"):
            if (number := getattr(check, name)) < 1:
                raise self._error((*path, name), f"{name}={number} is below its minimum 1")

    def _condition(self, text: str, path: _Path) -> None:
        self._try(lambda: Condition(text), path)

    def _duration(self, text: str, path: _Path) -> None:
        self._try(lambda: parse_duration(text), path)

    def _try(self, parse: Any, path: _Path) -> None:
        try:
            parse()
        except BadExpression as error:
            offset = 0 if path in self._blocks else error.column - 1 + (path in self._quoted)
            raise self._error(path, str(error), offset=offset) from None

    # ---- where it stands ------------------------------------------------------------------------------------

    def _located(self, error: msgspec.ValidationError) -> BadPlaybook:
        message, _, where = str(error).partition(" - at `")
        path: _Path = tuple(
            int(part[1:-1]) if part.startswith("[") else part.lstrip(".")
            for part in re.findall(r"\[\d+\]|\.?\w+", where.rstrip("`").removeprefix("$"))
        )
        if unknown := re.search(r"unknown field `(.+)`", message):
            field = unknown.group(1)
            close = difflib.get_close_matches(field, _fields_at(path), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(_fields_at(path))}"
            return self._error(path, f"unknown field {field!r}{hint}", self._marks.get((*path, field, "<key>")))
        return self._error(path, message)

    def _error(self, path: _Path, message: str, mark: yaml.Mark | None = None, offset: int = 0) -> BadPlaybook:
        while mark is None and path not in self._marks:
            path = path[:-1]
        mark = mark or self._marks[path]
        return BadPlaybook(f"{self._name}:{mark.line + 1}:{mark.column + 1 + offset}: {message}")


def _fields_at(path: _Path) -> tuple[str, ...]:
    """What may stand there."""
    kinds: dict[str, type[msgspec.Struct]] = {"steps": Step, "finally": Step, "checks": Check, "sweep": Sweep}
    named = [part for part in path if isinstance(part, str)]
    if named and named[-1] == "within":
        return ("min", "max")
    kind = kinds.get(named[-1], Playbook) if named else Playbook
    return kind.__struct_encode_fields__
