"""The command line's root: names every command and imports none until it is used.

Watching must start quickly and never load an engine, so this module imports click and nothing else of weight.
"""

import importlib
import sys
from typing import Any

import click

from schedtop import __version__
from schedtop.engine.errors import SchedtopError

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("schedtop.cli.serve:serve", "Run an engine, its control socket and its HTTP gateway."),
    "gateway": ("schedtop.cli.gateway:gateway", "Serve OpenAI's API, metrics and control over HTTP."),
    "demo": ("schedtop.cli.demo:demo", "Serve the built-in model under load and watch it."),
    "knobs": ("schedtop.cli.knobs:knobs", "Show knobs, or set them live."),
    "requests": ("schedtop.cli.requests:requests", "List live requests; abort, hold, preempt, prioritise."),
    "pause": ("schedtop.cli.ops:pause", "Stop scheduling: abort, wait or keep."),
    "resume": ("schedtop.cli.ops:resume", "Go on after a pause."),
    "drain": ("schedtop.cli.ops:drain", "Let what runs end and admit nobody new."),
    "audit": ("schedtop.cli.audit:audit", "Who changed what, when, and how it ended."),
    "play": ("schedtop.cli.play:play", "Run an operator playbook."),
    "sim": ("schedtop.cli.sim:sim", "Simulate situations with the engine's own scheduler."),
    "conformance": ("schedtop.cli.conformance:conformance", "Compare the scheduler with recorded vLLM traces."),
    "record": ("schedtop.cli.record:record", "Write the flight recorder to a file."),
    "export": ("schedtop.cli.record:export", "Turn a recording into CSV or JSON lines."),
    "bench": ("schedtop.cli.bench:bench", "Measure speed, side by side with peers."),
    "doctor": ("schedtop.cli.doctor:doctor", "Check an installation and a running engine."),
}
"""Command name -> (module:attribute, help in a line)."""


class LazyGroup(click.Group):
    """Lists commands from `COMMANDS` and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table: what people do most comes first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands with their line of help, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's, but an error that somebody caused is one line and exit status 1, never a traceback."""
        try:
            return super().main(*args, **kwargs)
        except SchedtopError as error:
            click.echo(f"schedtop: {error}", err=True)
            sys.exit(1)


@click.group(cls=LazyGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="schedtop")
@click.option("--connect", metavar="PATH|URL", help="Control socket or gateway; default: the running engine.")
@click.option("--readonly", is_flag=True, help="Watch only: no key changes anything.")
@click.option("--once", is_flag=True, help="Print the state once and exit (also when stdout is no terminal).")
@click.option("--json", "as_json", is_flag=True, help="With --once: as JSON.")
@click.option("--theme", metavar="NAME", help="dark, light, high-contrast, colour-blind, mono, or a file of yours.")
@click.pass_context
def cli(ctx: click.Context, connect: str | None, readonly: bool, once: bool, as_json: bool, theme: str | None) -> None:
    """Eyes and hands for a running LLM inference engine.

    Without a command: the live screen.
    """
    if ctx.invoked_subcommand is None:
        from schedtop.cli.watch import watch

        watch(connect=connect, read_only=readonly, once=once or as_json, as_json=as_json, theme=theme)
