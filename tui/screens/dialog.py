"""A box over the screen: lines that scroll, closed by Esc. Base of all dialogs; it knows no engine."""

from typing import TypeVar

from textual import events
from textual.app import ComposeResult
from textual.layout import Layout
from textual.screen import ModalScreen

from schedtop.tui.cells import Line, fit
from schedtop.tui.layout import Place
from schedtop.tui.views.frame import Body, Frame, framed, inner_size
from schedtop.tui.widgets.board import PlanLayout
from schedtop.tui.widgets.panel import Panel, StyleOf

T = TypeVar("T")


class Dialog(ModalScreen[T]):
    """A scrolling box. Subclasses give `title`, `body`, and `on_plain_key` for keys of their own."""

    DEFAULT_CSS = "Dialog { background: transparent; }"
    BINDINGS = []  # noqa: RUF012  (Textual's own way)
    heading = ""
    wanted_width = 78
    wanted_height = 200
    is_steady = False
    """Keep the wanted height whatever the text: for live data, so that the box doesn't jump."""

    def __init__(self, styles: StyleOf, is_ascii: bool = False) -> None:
        super().__init__()
        self.panel = Panel("dialog", is_ascii)
        self._arranger = PlanLayout()
        self.drawn_in = styles
        self.offset_line = 0

    def compose(self) -> ComposeResult:
        """Only the box: what it doesn't cover shows the screen below."""
        yield self.panel

    @property
    def layout(self) -> Layout:
        """The box lies where `repaint` puts it."""
        return self._arranger

    def body(self, width: int) -> list[Line]:
        """All lines, for a box with `width` cells inside."""
        raise NotImplementedError

    async def on_plain_key(self, event: events.Key) -> bool:
        """Take a key that the box itself doesn't; False when it means nothing here."""
        return False

    def close_dialog(self) -> None:
        """Close without an answer."""
        self.dismiss(None)

    @property
    def room(self) -> int:
        """Lines of text that fit into the box."""
        return max(1, self._place(0).height - 2)

    def _place(self, num_lines: int) -> Place:
        width = min(self.size.width, self.wanted_width + 4)
        lines = self.wanted_height if self.is_steady else min(self.wanted_height, num_lines or self.wanted_height)
        height = min(self.size.height, max(3, lines + 2))
        return Place((self.size.width - width) // 2, (self.size.height - height) // 2, width, height, Frame.BOX)

    def repaint(self) -> None:
        """Draw the box."""
        if not self.is_attached or not self.size:
            return
        width = inner_size(Frame.BOX, min(self.size.width, self.wanted_width + 4), 9)[0]
        lines = self.body(width)
        place = self._place(len(lines))
        height = place.height - 2
        self.offset_line = max(0, min(self.offset_line, len(lines) - height))
        shown = [fit(line, width) for line in lines[self.offset_line : self.offset_line + height]]
        more = f"{self.offset_line + height}/{len(lines)} ↓" if len(lines) > height + self.offset_line else ""
        body = Body(shown, ((more, "dim"),) if more else (("Esc closes", "dim"),))
        if self._arranger.plan.get("dialog") != place:
            self._arranger.plan = {"dialog": place}
            self.panel.refresh(layout=True)
        self.panel.show(framed(body, self.heading, "", Frame.BOX, (place.width, place.height), True), self.drawn_in)

    def on_mount(self) -> None:
        """Draw once laid out."""
        self.call_after_refresh(self.repaint)

    def on_unmount(self) -> None:
        """Let go of what was drawn: Textual remembers closed widgets by their drawn lines (`StylesCache` in an LRU)."""
        self.refresh()
        self.panel.refresh()

    def on_resize(self) -> None:
        """Draw again in the new size."""
        self.repaint()

    async def on_key(self, event: events.Key) -> None:
        """Esc closes, arrows scroll, the rest is the subclass's."""
        event.stop()
        event.prevent_default()
        if await self.on_plain_key(event):
            return
        match event.key:
            case "escape" | "q" | "ctrl+c":
                self.close_dialog()
            case "down" | "j":
                self.scroll_by(1)
            case "up" | "k":
                self.scroll_by(-1)
            case "pagedown" | "space":
                self.scroll_by(self.room)
            case "pageup":
                self.scroll_by(-self.room)
            case "g" | "home":
                self.scroll_by(-100_000)
            case "G" | "end":
                self.scroll_by(100_000)

    def scroll_by(self, delta: int) -> None:
        """Scroll the text."""
        self.offset_line += delta
        self.repaint()

    def on_panel_clicked(self, message: Panel.Clicked) -> None:
        """The wheel scrolls; a click is the subclass's."""
        message.stop()
        if message.wheel:
            self.scroll_by(3 * message.wheel)
        else:
            self.on_line_clicked(message.y - 1 + self.offset_line)

    def on_line_clicked(self, line: int) -> None:
        """A line of the text was clicked."""
