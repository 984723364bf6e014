"""Lines made of styled spans, measured in terminal cells. No colours here: a span names a role, themes colour roles.

Nothing in here knows engines or Textual; `schedtop --once` prints the same lines as the screen.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.cells import cell_len as uncached_cell_len
from rich.cells import set_cell_size

Span = tuple[str, str]
"""(text, role)."""
Line = tuple[Span, ...]

cell_len = lru_cache(maxsize=16_384)(uncached_cell_len)
"""Cells that a text takes; the same few texts are measured all the time."""

_ASCII_GROUPS = {
    "-": "─—–−┄", "|": "│┃▏▎▍", "+": "╭╮╰╯├┤┬┴┼±✓", "=": "━≥", "<": "◀←≤", ">": "▶→›", "#": "█▇▆▊▉■", "%": "▅▄▒▓",
    ":": "▌▋░", ".": "▃▂▁·", "~": "…", "*": "•●◆", "o": "○◌□▪▫", "^": "▲↑", "v": "▼↓", "x": "×✗", "/": "÷",
    "!": "⚠", "@": "⟳", "P": "⏸", "&": "◇", ",": "╻",
}  # fmt: skip
ASCII = str.maketrans({char: plain for plain, chars in _ASCII_GROUPS.items() for char in chars})
"""One cell for one cell, for terminals without these glyphs."""


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """Text from users made safe to draw: control and format characters (joiners, text direction) replaced.

    >>> clean("a\\x1b[31mb\\n")
    'a�[31mb�'
    """
    return "".join(_safe(char) for char in text)


def _safe(char: str) -> str:
    category = unicodedata.category(char)
    if category in ("Cc", "Cs", "Zl", "Zp"):
        return "\N{REPLACEMENT CHARACTER}"
    return "·" if category in ("Cf", "Co") or char == "\N{VARIATION SELECTOR-16}" else char


def cut(text: str, width: int, right: bool = False) -> str:
    """`text` in exactly `width` cells: padded, or cut on a cell border with an ellipsis.

    >>> cut("abcdef", 4), cut("ab", 4), cut("ab", 4, right=True), cut("日本語", 4)
    ('abc…', 'ab  ', '  ab', '日… ')
    """
    if width <= 0:
        return ""
    length = cell_len(text)
    if length > width:
        kept = set_cell_size(text, width - 1).rstrip()
        return kept + "…" + " " * (width - 1 - cell_len(kept))
    return " " * (width - length) + text if right else text + " " * (width - length)


def cut_id(text: str, width: int) -> str:
    """An id in exactly `width` cells: a long one loses its middle, for ids differ at their ends.

    >>> cut_id("chatcmpl-7f3a-12", 10), cut_id("r1", 4), cut_id("日本語", 4)
    ('chat…3a-12', 'r1  ', '日… ')
    """
    if cell_len(text) <= width or width < 5 or cell_len(text) != len(text):
        return cut(text, width)
    tail = width // 2
    return text[: width - 1 - tail] + "…" + text[-tail:]


def width_of(line: Iterable[Span]) -> int:
    """Cells that a line takes."""
    total = 0
    for text, _ in line:
        total += cell_len(text)
    return total


def fit(line: Sequence[Span], width: int, fill: str = "text") -> Line:
    """`line` in exactly `width` cells, cut at its end or padded with spaces of role `fill`."""
    total = width_of(line)
    if total == width:
        return tuple(line)
    if total < width:
        return (*line, (" " * (width - total), fill))
    kept: list[Span] = []
    left = width
    for text, role in line:
        size = cell_len(text)
        if size >= left:
            kept.append((cut(text + " ", left) if size == left and total > width else cut(text, left), role))
            break
        kept.append((text, role))
        left -= size
    return tuple(span for span in kept if span[0])


def between(left: Sequence[Span], right: Sequence[Span], width: int, fill: str = "text") -> Line:
    """`left` and `right` at the two ends of `width` cells; the right end is kept when both don't fit."""
    right_width = width_of(right)
    if right_width >= width:
        return fit(right, width)
    return (*fit(left, width - right_width, fill), *right)


def join(parts: Iterable[Sequence[Span]], gap: str = "  ") -> Line:
    """Parts that aren't empty, one after the other."""
    spans: list[Span] = []
    for part in parts:
        if part:
            spans.extend([(gap, "text")] if spans else [])
            spans.extend(part)
    return tuple(spans)


def plain(line: Iterable[Span]) -> str:
    """The line's text alone."""
    return "".join(text for text, _ in line)


def block(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """Exactly `height` lines of `width` cells."""
    empty = ((" " * width, "text"),)
    return [fit(line, width) for line in lines[:height]] + [empty] * max(0, height - len(lines))


def wrap(text: str, width: int) -> list[str]:
    """`text` broken at spaces into lines of at most `width` cells."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
