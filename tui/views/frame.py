"""How a panel's lines get their title: a box, a ruled line, or nothing. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from schedtop.tui.cells import Line, Span, between, block, fit, width_of

_LEAST_TITLE = 8
"""Cells below which the right end of a title is left out."""


class Frame(StrEnum):
    """Kinds of frame, from the one that costs most rows to the one that costs none."""

    BOX = "box"
    RULE = "rule"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Body:
    """What a view function returns: lines, and words for the right end of the title."""

    lines: list[Line]
    title: Line = ()
    digest: Line = field(default=())
    """The panel in one line, for when there is no room for more."""


def inner_size(frame: Frame, width: int, height: int) -> tuple[int, int]:
    """Room left inside a frame of `width` x `height` cells."""
    if frame is Frame.BOX:
        return max(0, width - 4), max(0, height - 2)
    return width, max(0, height - (1 if frame is Frame.RULE else 0))


def framed(body: Body, name: str, key: str, frame: Frame, size: tuple[int, int], is_focused: bool) -> list[Line]:
    """Exactly `size` (width, height) cells: the body in its frame."""
    width, height = size
    role = "focus" if is_focused else "border"
    inner_width, inner_height = inner_size(frame, width, height)
    lines = block(body.lines, inner_width, inner_height)
    if frame is Frame.NONE:
        return lines
    title = _title(name, key, body.title, width - (2 if frame is Frame.BOX else 0), role)
    if frame is Frame.RULE:
        return [title, *lines]
    top = fit((("╭", role), *title, ("╮", role)), width)
    sides = [fit((("│ ", role), *line, (" │", role)), width) for line in lines]
    bottom: Line = (("╰" + "─" * (width - 2) + "╯", role),)
    return [top, *sides, fit(bottom, width)]


def _title(name: str, key: str, right: Line, width: int, role: str) -> Line:
    left: list[Span] = [("─", role)]
    left += [(f" {key}", "key")] if key else []
    left += [(f" {name} ", "title_focus" if role == "focus" else "title")]
    room = width - width_of(left) - 4
    end: list[Span] = [(" ", role), *(right if width_of(right) <= room else fit(right, room)), (" ─", role)]
    if not right or room < _LEAST_TITLE:
        end = []
    filler = "─" * max(0, width - width_of(left) - width_of(end))
    return between((*left, (filler, role)), end, width, role)
