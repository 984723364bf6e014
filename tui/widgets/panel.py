"""A widget that shows lines of spans and repaints only the cells that changed. It decides nothing."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.filter import LineFilter
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from schedtop.tui.cells import ASCII, Line, Span, cell_len, width_of

StyleOf = Callable[[str], Style]
_GAP = 8
"""Unchanged cells between two changed stretches that are cheaper to draw again than to jump over."""


class Panel(Widget):
    """Lines on screen. `show` takes the whole new picture and refreshes what differs from the last."""

    DEFAULT_CSS = "Panel { width: 1fr; height: 1fr; }"

    class Clicked(Message):
        """Somebody clicked line `y`, column `x`, or turned the wheel there (`wheel` -1 up, +1 down)."""

        def __init__(self, panel: "Panel", x: int, y: int, wheel: int = 0, is_double: bool = False) -> None:
            super().__init__()
            self.panel = panel
            self.x, self.y, self.wheel, self.is_double = x, y, wheel, is_double

    def __init__(self, name: str, is_ascii: bool = False) -> None:
        super().__init__(name=name, id=name)
        self._is_ascii = is_ascii
        self._shown: list[Line] = []
        self._widths: list[int] = []
        self._styles_of: StyleOf = lambda role: Style.null()
        self.num_cells_refreshed = 0
        """Counts for the cost tests: cells asked to be drawn again."""

    def show(self, lines: list[Line], styles: StyleOf) -> None:
        """Draw `lines` in `styles`; only cells that differ from what is shown are refreshed."""
        old, self._shown = self._shown, lines
        self._widths = [width_of(line) for line in lines]
        if styles is not self._styles_of or len(old) != len(lines):
            self._styles_of = styles
            self.refresh()
            self.num_cells_refreshed += self.size.area
            return
        regions = [
            Region(first, y, last - first, 1)
            for y, (before, after) in enumerate(zip(old, lines, strict=True))
            if before != after
            for first, last in changed_spans(before, after)
        ]
        if regions:
            self.num_cells_refreshed += sum(region.width for region in regions)
            self.refresh(*regions)

    def text(self) -> str:
        """What is shown, without styles."""
        return "\n".join("".join(text for text, _ in line) for line in self._shown)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """None of Textual's colour filters: themes give every colour themselves, and without colours have none."""
        return ()

    def render_line(self, y: int) -> Strip:
        """One line, styled. Called by Textual for lines that were refreshed."""
        width = self.size.width
        if y >= len(self._shown):
            return Strip([Segment(" " * width, self._styles_of("text"))], width)
        line = self._shown[y]
        strip = Strip(self._segments(line), self._widths[y])
        return strip if self._widths[y] == width else strip.adjust_cell_length(width, self._styles_of("text"))

    def _segments(self, line: Line) -> list[Segment]:
        """Spans as segments, neighbours of one style joined."""
        segments: list[Segment] = []
        pending, pending_style = "", Style.null()
        for text, role in line:
            style = self._styles_of(role)
            if style is pending_style:
                pending += text
            else:
                if pending:
                    segments.append(Segment(self._drawn(pending), pending_style))
                pending, pending_style = text, style
        return [*segments, Segment(self._drawn(pending), pending_style)]

    def _drawn(self, text: str) -> str:
        return text.translate(ASCII) if self._is_ascii else text

    def on_click(self, event: events.Click) -> None:
        """Tell the screen which line was clicked."""
        self.post_message(self.Clicked(self, event.x, event.y, is_double=event.chain > 1))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Tell the screen that the wheel was turned here."""
        self.post_message(self.Clicked(self, event.x, event.y, wheel=1))

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Tell the screen that the wheel was turned here."""
        self.post_message(self.Clicked(self, event.x, event.y, wheel=-1))


def changed_spans(before: Sequence[Span], after: Sequence[Span]) -> list[tuple[int, int]]:
    """First and past-last cells of the stretches in which two lines of equal width differ.

    >>> changed_spans([("ab", "x"), ("c", "y"), ("d", "x")], [("ab", "x"), ("e", "y"), ("d", "x")])
    [(2, 3)]
    >>> changed_spans([("abc", "x")], [("a", "x"), ("bc", "x")])
    [(0, 3)]
    """
    old_edges, new_edges = _edges(before), _edges(after)
    if old_edges != new_edges:
        return [(0, new_edges[-1])] if after else []
    stretches: list[tuple[int, int]] = []
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        first = new_edges[place - 1] if place else 0
        if stretches and first - stretches[-1][1] <= _GAP:
            first = stretches.pop()[0]
        stretches.append((first, new_edges[place]))
    return stretches


def _edges(line: Sequence[Span]) -> list[int]:
    """Where each span ends, in cells."""
    return list(accumulate(cell_len(text) for text, _ in line))
