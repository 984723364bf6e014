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


class KnobAssignment(click.ParamType[tuple[str, KnobValue]]):
    """`NAME=VALUE`; converts to a pair."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, KnobValue]:
        """Split and parse; a missing `=` is a usage error."""
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name or not text:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name, parse_value(text)

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


def as_changes(assignments: Sequence[tuple[str, KnobValue]]) -> dict[str, KnobValue]:
    """Knob to value. Raises `UsageError` for a knob that is named twice."""
    changes: dict[str, KnobValue] = {}
    for name, value in assignments:
        if name in changes:
            raise click.UsageError(f"{name} is given twice: {changes[name]} and {value}")
        changes[name] = value
    return changes
