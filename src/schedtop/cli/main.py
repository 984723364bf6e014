"""The command line's root: names every command and imports none until it is used.

What a command does is in its own module. Errors that a user can cause end here as one line, exit status 1 (2 for a
wrong command line), never as a traceback.
"""

import contextlib
import difflib
import errno
import importlib
import os
import sys
from typing import Any

import click

from schedtop import __version__
from schedtop.engine.errors import SchedtopError

CONNECT_VARIABLE = "SCHEDTOP_CONNECT"

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "See and steer a running engine": {
        "knobs": ("schedtop.cli.knobs:knobs", "Show knobs, or set them live."),
        "requests": ("schedtop.cli.requests:requests", "List live requests; abort, hold, preempt, prioritise."),
        "pause": ("schedtop.cli.ops:pause", "Stop scheduling: abort, wait or keep."),
        "resume": ("schedtop.cli.ops:resume", "Go on after a pause."),
        "drain": ("schedtop.cli.ops:drain", "Let what runs end and admit nobody new."),
        "reset-cache": ("schedtop.cli.ops:reset_cache", "Forget all cached prefixes."),
        "self-check": ("schedtop.cli.ops:self_check", "Prove block and reference accounting on the live engine."),
        "steps": ("schedtop.cli.steps:steps", "The last steps: how long, with whom, what held them up."),
        "audit": ("schedtop.cli.audit:audit", "Who changed what, when, and how it ended."),
        "play": ("schedtop.cli.play:play", "Run an operator playbook."),
        "autopilot": ("schedtop.cli.autopilot:autopilot", "Keep promises of latency by turning knobs, within bounds."),
        "model": ("schedtop.cli.foresight:model", "The step-time model, fitted from live steps."),
        "forecast": ("schedtop.cli.foresight:forecast_command", "What a knob will do, before it is turned."),
        "record": ("schedtop.cli.record:record", "Write the flight recorder to a file."),
        "replay": ("schedtop.cli.replay:replay", "Look at a recording on the screen: play, step, seek, search."),
        "export": ("schedtop.cli.record:export", "Turn a recording into CSV or JSON lines."),
    },
    "Run an engine": {
        "demo": ("schedtop.cli.demo:demo", "Serve the built-in model under load and watch it."),
        "serve": ("schedtop.cli.serve:serve", "Run an engine, its control socket and its HTTP gateway."),
        "gateway": ("schedtop.cli.gateway:gateway", "Serve OpenAI's API, metrics and control over HTTP."),
        "doctor": ("schedtop.cli.doctor:doctor", "Check an installation and a running engine."),
    },
    "Work without one": {
        "sim": ("schedtop.cli.sim:sim", "Simulate situations with the engine's own scheduler."),
        "conformance": ("schedtop.cli.conformance:conformance", "Compare the scheduler with recorded vLLM traces."),
        "bench": ("schedtop.cli.bench:bench", "Measure speed, side by side with peers."),
    },
}
"""Heading -> command name -> (module:attribute, one line of help)."""

_TARGETS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class _Failure(click.ClickException):
    """One line on standard error, exit status 1."""

    def show(self, file: Any = None) -> None:
        """Print it the way all our errors look."""
        click.echo(f"schedtop: error: {self.format_message()}", err=True, file=file)


class LazyGroup(click.Group):
    """A group whose commands are looked up in `SECTIONS` and imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table: what people do most comes first."""
        return list(_TARGETS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in _TARGETS:
            return None
        module, attribute = _TARGETS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands with their line of help, without importing any."""
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, summary) for name, (_, summary) in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Answer a misspelt name with the nearest one."""
        name = args[0]
        if name not in _TARGETS and not name.startswith("-"):
            close = difflib.get_close_matches(name, _TARGETS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "; `schedtop --help` lists them all"
            ctx.fail(f"no command is called {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, but an error that somebody caused becomes one line."""
        try:
            return super().invoke(ctx)
        except SchedtopError as error:
            raise _Failure(str(error)) from None
        except click.ClickException as error:
            if type(error) is click.ClickException:
                raise _Failure(error.message) from None
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            _drop_output()
            raise _Failure(f"the output can't be written: {error.strerror}") from None


def _drop_output() -> None:
    """What is buffered yet would fail again, loudly, at the end of the process."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--connect", metavar="PATH|URL", help="Engine to talk to; default: the one that is running.")
@click.option("--readonly", is_flag=True, help="Watch only: no key changes anything.")
@click.option("--once", is_flag=True, help="Print one view and end (also chosen when stdout is no terminal).")
@click.option("--json", "as_json", is_flag=True, help="With --once: the snapshot as JSON.")
@click.option(
    "--theme", metavar="NAME|FILE", help="dark, light, high-contrast, colour-blind, mono, or a file of yours."
)
@click.version_option(__version__, prog_name="schedtop")
@click.pass_context
def cli(ctx: click.Context, connect: str | None, readonly: bool, once: bool, as_json: bool, theme: str | None) -> None:
    """Eyes and hands for a running LLM inference engine. Without a command: the screen."""
    if ctx.invoked_subcommand is None:
        from schedtop.cli.watch import watch

        watch(connect=connect, read_only=readonly, once=once or as_json, as_json=as_json, theme=theme)
        return
    given = [
        name
        for name, value in (("--readonly", readonly), ("--once", once), ("--json", as_json), ("--theme", theme))
        if value
    ]
    if given:
        raise click.UsageError(f"{given[0]} before a command means the screen: put it after {ctx.invoked_subcommand!r}")
    if connect is not None:
        _pass_on(ctx, connect)


def _pass_on(ctx: click.Context, connect: str) -> None:
    """`--connect` before a command: where every command and every process it starts looks for it."""
    before = os.environ.get(CONNECT_VARIABLE)
    os.environ[CONNECT_VARIABLE] = connect

    def restore() -> None:
        if before is None:
            del os.environ[CONNECT_VARIABLE]
        else:
            os.environ[CONNECT_VARIABLE] = before

    ctx.call_on_close(restore)
