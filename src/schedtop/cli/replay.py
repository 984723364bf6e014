"""`schedtop replay`: a recording on the screen, or frame by frame as JSON lines. Starts things; draws nothing."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedtop.cli.watch import has_screen, is_in_browser, screen_options
from schedtop.engine.errors import ConfigError

if TYPE_CHECKING:
    from schedtop.tui.tape import Tape


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print every frame as a line of JSON instead.")
@click.option("--theme", metavar="NAME|FILE", help="Colours of the screen.")
def replay(file: Path, as_json: bool, theme: str | None) -> None:
    """Show a recording made by `schedtop record` on the screen: play, step, seek, search. Nothing can be changed."""
    from schedtop.tui.tape import Tape

    if as_json:
        print_frames(Tape(file))
        return
    if not (is_in_browser() or (has_screen() and sys.stderr.isatty())):
        raise ConfigError("a replay needs a terminal; for programs there is --json")
    from schedtop.tui.replay import ReplayApp

    app = ReplayApp(Tape(file), screen_options(True, theme))
    app.run()
    sys.exit(app.return_code or 0)


def print_frames(tape: "Tape") -> None:
    """Each frame as `schedtop --once --json` would have said it then, with its place, wall time and events."""
    from schedtop.tui import once
    from schedtop.tui.state import Scene

    view = tape.view_at(0)
    for place, frame in enumerate(tape.frames):
        view = tape.advanced(view, place) if place else view
        click.echo(once.frame_as_json(Scene(view, now=frame.wall), place, frame.wall, tape.events(place)))
