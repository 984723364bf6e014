"""What goes to the terminal for a partial update: only the cells asked for, and only the colours that change.

Textual writes each changed stretch from its widget's left edge, and a full set of colours per piece of text; over ssh
that is most of what a screen costs. This relies on two of Textual's private classes: where they are missing `narrowed`
does nothing, and where they look otherwise than expected a `NarrowUpdate` writes in Textual's own way.
"""

from collections.abc import Iterable
from functools import lru_cache

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.control import Control
from rich.segment import Segment
from rich.style import Style

_ATTRIBUTES = (("bold", "1"), ("dim", "2"), ("italic", "3"), ("underline", "4"), ("reverse", "7"), ("strike", "9"))
_Codes = tuple[str, str, str]
"""Attributes, foreground, background: parameters of one SGR sequence."""
_PLAIN: _Codes = ("", "39", "49")


class Pen:
    """Remembers the colours last written, to write only those that change."""

    def __init__(self, colours: ColorSystem | None) -> None:
        self._colours = colours
        self._parts: list[str] = ["\x1b[0m"]
        self._codes = _PLAIN

    def move_to(self, x: int, y: int) -> None:
        """Go to a cell."""
        self._parts.append(Control.move_to(x, y).segment.text)

    def write(self, segments: Iterable[Segment]) -> None:
        """Write text in its style."""
        for text, style, control in segments:
            if not control:
                self._parts.append(self._turn_to(codes_of(style, self._colours)) + text)

    def _turn_to(self, codes: _Codes) -> str:
        old, self._codes = self._codes, codes
        if codes == old:
            return ""
        if codes[0] != old[0]:
            old = _PLAIN
            changed = ["0", codes[0]] if codes[0] else ["0"]
        else:
            changed = []
        changed += [new for new, before in zip(codes[1:], old[1:], strict=True) if new != before]
        return f"\x1b[{';'.join(changed)}m"

    def lifted(self) -> str:
        """All that was written, ending in plain style."""
        return "".join([*self._parts, "\x1b[0m"])


@lru_cache(maxsize=1024)
def codes_of(style: Style | None, colours: ColorSystem | None) -> _Codes:
    """A style as SGR parameters for a terminal of the given colours."""
    if style is None or colours is None:
        return _PLAIN
    attributes = ";".join(code for name, code in _ATTRIBUTES if getattr(style, name))
    front = style.color.downgrade(colours).get_ansi_codes(True) if style.color else ("39",)
    back = style.bgcolor.downgrade(colours).get_ansi_codes(False) if style.bgcolor else ("49",)
    return attributes, ";".join(front), ";".join(back)


try:
    from textual._compositor import ChopsUpdate, CompositorUpdate
except ImportError:

    def narrowed(renderable: RenderableType | None) -> RenderableType | None:
        """As it is: this Textual has other classes."""
        return renderable

else:

    class NarrowUpdate(CompositorUpdate):
        """A `ChopsUpdate` that writes less for the same picture."""

        def __init__(self, update: ChopsUpdate) -> None:
            self._update = update

        def render_segments(self, console: Console) -> str:
            """The changed cells as terminal data."""
            try:
                return self._narrow(Pen(console._color_system))
            except (AttributeError, TypeError, ValueError):  # another Textual's update: let it write itself
                return self._update.render_segments(console)

        def _narrow(self, pen: Pen) -> str:
            for y, first, past in self._update.spans:
                ends = self._update.chop_ends[y]
                for end, (x, strip) in zip(ends, self._update.chops[y].items(), strict=False):
                    left, right = max(x, first), min(end, past)
                    if strip is not None and left < right:
                        pen.move_to(left, y)
                        pen.write(strip.crop(left - x, right - x))
            return pen.lifted()

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            """As Textual's; not used for a terminal."""
            return self._update.__rich_console__(console, options)

    def narrowed(renderable: RenderableType | None) -> RenderableType | None:
        """A partial update that writes less; everything else as it is."""
        return NarrowUpdate(renderable) if isinstance(renderable, ChopsUpdate) else renderable
