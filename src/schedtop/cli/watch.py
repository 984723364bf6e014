"""The bare `schedtop`: the live screen, or the state once for scripts and pipes. Starts things; draws nothing."""

import asyncio
import locale
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from schedtop.control.discovery import CONNECT_VARIABLE, discover, is_url, resolve
from schedtop.engine.errors import ConfigError

if TYPE_CHECKING:
    from schedtop.tui.app import Options

DEFAULT_WIDTH = 120
_WITHOUT_GLYPHS = ("dumb", "linux", "vt100", "vt102", "vt220")


def watch(connect: str | None, read_only: bool, once: bool, as_json: bool, theme: str | None) -> None:
    """Show the engine at `connect`, or the running ones. Raises `SchedtopError` when there is none or none answers."""
    if theme:
        check_theme(theme)
    is_once = once or as_json or not has_screen()
    if is_url(address := connect or os.environ.get(CONNECT_VARIABLE, "")):
        from schedtop.cli.scraped import watch_plain  # aiohttp only for those who need it

        if watch_plain(address, is_once, as_json, theme):
            return
    if is_once:
        print_once(resolve(connect), as_json)
    elif not (is_in_browser() or sys.stderr.isatty()):
        raise ConfigError("the screen is drawn on standard error, which is redirected: leave out `2>`, or give --once")
    else:
        run_screen(targets(connect), read_only, theme)


def is_in_browser() -> bool:
    """Whether textual-serve runs us: it draws in a browser what the screen writes to a pipe."""
    return bool(os.environ.get("TEXTUAL_DRIVER"))


def has_screen() -> bool:
    """Whether there is something to draw on."""
    return is_in_browser() or (sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb")


def check_theme(theme: str) -> None:
    """Raise `ConfigError` for a theme that there isn't, wherever the state is shown. Loads no Textual."""
    from schedtop.tui.config import config_folder
    from schedtop.tui.theme import load_all

    palettes, faults = load_all(config_folder() / "themes")
    if theme not in palettes:
        raise ConfigError("\n".join([*faults, _no_theme(theme, palettes)]))


def _no_theme(theme: str, palettes: Iterable[str]) -> str:
    return f"no theme is called {theme!r}; there are {', '.join(palettes)}"


def targets(connect: str | None) -> list[str]:
    """What to connect to: the one named, else all live engines (several: the fleet view)."""
    if connect or os.environ.get(CONNECT_VARIABLE):
        return [resolve(connect)]
    return discover() or [resolve(None)]


def print_once(target: str, as_json: bool) -> None:
    """Print the state and return."""
    from schedtop.tui import once

    scene = asyncio.run(once.read_scene(target))
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 40)).columns
    click.echo(once.as_json(scene) if as_json else once.as_text(scene, width, is_ascii=not has_glyphs()))


def run_screen(addresses: Sequence[str], read_only: bool, theme: str | None) -> None:
    """Run the live screen until the operator leaves; exits with its return code."""
    from schedtop.tui.app import SchedtopApp
    from schedtop.tui.link import ClientLink

    app = SchedtopApp([ClientLink(address, read_only) for address in addresses], screen_options(read_only, theme))
    app.run()
    sys.exit(app.return_code or 0)


def screen_options(read_only: bool, theme: str | None) -> "Options":
    """The screen's options from the operator's folder, environment and terminal. Raises `ConfigError`."""
    from schedtop.tui.app import Options
    from schedtop.tui.config import config_folder, load
    from schedtop.tui.theme import DEFAULT, load_all

    config = load(config_folder() / "config.toml")
    palettes, faults = load_all(config_folder() / "themes")
    wanted = theme or config.theme or DEFAULT
    if wanted not in palettes:
        faults.append(_no_theme(wanted, palettes))
        if theme:
            raise ConfigError("\n".join(faults))
    return Options(
        theme=wanted, palettes=palettes, keymap=config.keys, read_only=read_only, interval_s=config.interval_s,
        is_ascii=not has_glyphs(), has_colour="NO_COLOR" not in os.environ, notes=faults,
        playbooks=config_folder() / "playbooks",
    )  # fmt: skip


def has_glyphs() -> bool:
    """Whether the terminal can be trusted with box drawing and block glyphs."""
    if is_in_browser():
        return True
    is_utf8 = "utf" in locale.getpreferredencoding(False).lower()
    return is_utf8 and os.environ.get("TERM", "") not in _WITHOUT_GLYPHS
