"""How values are written on the command line."""

from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import KnobSpec, KnobValue, knob_table


def parse_value(text: str) -> KnobValue:
    """`true`, `false`, a whole number, a number, or the text itself; the knob table has the last word."""
    words: dict[str, KnobValue] = {"true": True, "on": True, "false": False, "off": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class Assignment(click.ParamType[tuple[str, Any]]):
    """`NAME=VALUE`; converts to a pair of texts."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Split; a missing `=` is a usage error."""
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name or not text:
            self.fail(f"{value!r} is not {self.name}", param, ctx)
        return name, self.parse(text)

    def parse(self, text: str) -> Any:
        """The value behind the `=`."""
        return text


class AdapterAssignment(Assignment):
    """An adapter's name and its folder."""

    name = "NAME=FOLDER"


class KnobAssignment(Assignment):
    """A knob and its value."""

    def parse(self, text: str) -> KnobValue:
        """See `parse_value`."""
        return parse_value(text)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names from the knob table; after the `=`, the words a knob may be set to."""
        name, equals, _ = incomplete.partition("=")
        table = {spec.name: spec for spec in knob_table(EngineConfig())}
        if equals:
            offered = [f"{name}={word}" for word in _words_of(table[name])] if name in table else []
            return [CompletionItem(text) for text in offered if text.startswith(incomplete)]
        return [CompletionItem(f"{name}=", help=table[name].summary) for name in table if name.startswith(incomplete)]


def _words_of(spec: KnobSpec) -> tuple[str, ...]:
    return ("true", "false") if spec.kind == "bool" else tuple(spec.choices)


KNOB_ASSIGNMENT = KnobAssignment()
ADAPTER_ASSIGNMENT = AdapterAssignment()


def as_changes(assignments: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Name to value. Raises `UsageError` for a name that is given twice."""
    changes: dict[str, Any] = {}
    for name, value in assignments:
        if name in changes:
            raise click.UsageError(f"{name} is given twice: {changes[name]} and {value}")
        changes[name] = value
    return changes
