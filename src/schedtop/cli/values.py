"""How values are written on the command line."""

from typing import Any

import click

from schedtop.engine.knobs import KnobValue


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


KNOB_ASSIGNMENT = KnobAssignment()
