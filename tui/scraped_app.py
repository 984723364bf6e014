"""The screen over a plain server's `/metrics`: scrapes once a second and draws. It has no keys but those that leave."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from textual.app import App, ComposeResult

from schedtop.control.errors import Disconnected
from schedtop.control.vllm.scrape import Reading, read
from schedtop.control.vllm.windows import History
from schedtop.tui import ending
from schedtop.tui.scraped import picture
from schedtop.tui.theme import Palette
from schedtop.tui.widgets.panel import Panel

INTERVAL_S = 1.0
Fetch = Callable[[], Awaitable[str]]


@dataclass
class Scraper:
    """The scrapes of one server so far."""

    fetch: Fetch
    clock: Callable[[], float] = time.monotonic
    trouble: str = ""

    def __post_init__(self) -> None:
        self.histories: dict[str, History] = {}

    async def scrape(self) -> None:
        """Fetch once more; what goes wrong is kept in `trouble`, and the numbers before it stay."""
        try:
            readings = read(await self.fetch())
        except Disconnected as failure:
            self.trouble = str(failure)
            return
        self.trouble = ""
        self.take(readings)

    def take(self, readings: list[Reading]) -> None:
        """Fold one page in; engines that are gone from it are gone from the picture."""
        now = self.clock()
        before, self.histories = self.histories, {}
        for reading in readings:
            name = f"{reading.kind} {reading.engine}"
            self.histories[name] = before.get(name) or History()
            self.histories[name].add(now, reading)


class ScrapedApp(App[None]):
    """A server without our control socket, read-only."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "schedtop"
    BINDINGS = [("q", "quit", "leave"), ("ctrl+c", "quit", "leave"), ("escape", "quit", "leave")]  # noqa: RUF012

    def __init__(self, target: str, fetch: Fetch, palette: Palette, is_ascii: bool = False) -> None:
        super().__init__(ansi_color=True)
        self._target, self._palette, self._is_ascii = target, palette, is_ascii
        self._style = palette.style
        self.scraper = Scraper(fetch)

    def compose(self) -> ComposeResult:
        """One panel."""
        yield Panel("scraped", self._is_ascii)

    async def on_mount(self) -> None:
        """Scrape at once, then every second."""
        if not self.is_headless:
            ending.exit_on_signals(lambda code: self.exit(return_code=code))
        self.set_interval(INTERVAL_S, self.look)
        self.run_worker(self.look())

    async def look(self) -> None:
        """Scrape and draw."""
        await self.scraper.scrape()
        self.draw()

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.draw()

    def draw(self) -> None:
        """Show what is known."""
        panel = self.query_one(Panel)
        lines = picture(self._target, self.scraper.histories, self.scraper.trouble, panel.size.width)
        empty = ((" " * panel.size.width, "text"),)
        panel.show([*lines[: panel.size.height], *[empty] * (panel.size.height - len(lines))], self._style)
