"""`schedtop --connect http://HOST:PORT` where a plain vLLM or SGLang answers: its `/metrics`, read-only."""

import asyncio
import shutil
import sys

import click

from schedtop.control.errors import Disconnected
from schedtop.control.vllm.scrape import METRICS_ROUTE, fetch, is_plain_server, read


def watch_plain(target: str, is_once: bool, as_json: bool, theme: str | None) -> bool:
    """Show a server that is none of our gateways; False when it is one, or nobody answers (yet).

    An address that ends in /metrics is always read as a page; then `Disconnected` is raised when there is none.
    """
    try:
        page = asyncio.run(_page(target))
    except Disconnected:
        if target.rstrip("/").endswith(METRICS_ROUTE):
            raise
        return False
    if not is_plain_server(page) and not target.rstrip("/").endswith(METRICS_ROUTE):
        return False
    if is_once:
        _print(target, page, as_json)
    else:
        _run(target, theme)
    return True


async def _page(target: str) -> str:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        return await fetch(session, target)


def _print(target: str, page: str, as_json: bool) -> None:
    from schedtop.cli.watch import DEFAULT_WIDTH, has_glyphs
    from schedtop.tui import scraped
    from schedtop.tui.cells import ASCII, plain
    from schedtop.tui.scraped_app import Scraper

    readings = read(page)
    if as_json:
        click.echo(scraped.as_json(target, readings))
        return
    scraper = Scraper(lambda: _page(target))
    scraper.take(readings)
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 40)).columns
    text = "\n".join(plain(line).rstrip() for line in scraped.picture(target, scraper.histories, "", width))
    click.echo(text if has_glyphs() else text.translate(ASCII))


def _run(target: str, theme: str | None) -> None:
    from schedtop.cli.watch import screen_options
    from schedtop.tui.scraped_app import ScrapedApp
    from schedtop.tui.theme import WITHOUT_COLOUR

    options = screen_options(True, theme)
    palette = options.palettes[options.theme if options.has_colour else WITHOUT_COLOUR]
    app = ScrapedApp(target, lambda: _page(target), palette, options.is_ascii)
    app.run()
    sys.exit(app.return_code or 0)
