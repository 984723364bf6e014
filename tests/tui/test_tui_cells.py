"""Text from users and lines of spans: widths are in cells, nothing is markup, columns stay aligned."""

import doctest
import importlib

import pytest
from rich.cells import cell_len

from schedtop.tui.cells import ASCII, between, clean, cut, fit, plain, width_of

NASTY = [
    "日本語のリクエスト",
    "👨‍👩‍👧‍👦-family",
    "e\u0301te\u0301",
    "a\u200db",
    "\x1b[31mred\x1b[0m",
    "[bold]x[/bold]",
    "tab\there",
    "\u202eevil",
    "",
]


@pytest.mark.parametrize(
    "module",
    [
        "cells",
        "format",
        "table",
        "staging",
        "keys",
        "hands",
        "views.knobs",
        "views.budget",
        "widgets.panel",
        "screens.live",
    ],
)
def test_the_examples_in_the_docstrings_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"schedtop.tui.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("width", [1, 2, 5, 12])
@pytest.mark.parametrize("right", [False, True])
def test_a_cut_text_takes_exactly_its_width(text: str, width: int, right: bool) -> None:
    assert cell_len(cut(clean(text), width, right)) == width


def test_control_characters_and_joiners_never_reach_the_terminal() -> None:
    for text in NASTY:
        assert not any(ord(char) < 32 or char in "\u200d\u202e\x7f" for char in clean(text))


@pytest.mark.parametrize("width", range(1, 30))
def test_a_fitted_line_takes_exactly_its_width(width: int) -> None:
    line = (("日本", "a"), ("abc", "b"), ("é", "a"), ("語の長い", "b"))
    assert width_of(fit(line, width)) == width


def test_the_right_end_survives_when_both_ends_do_not_fit() -> None:
    assert plain(between([("a very long left side", "text")], [("END", "text")], 10)).endswith("END")


def test_the_ascii_fallback_keeps_every_width() -> None:
    for char, replacement in ASCII.items():
        assert len(str(replacement)) == 1 == cell_len(chr(char))
        assert str(replacement).isascii()
