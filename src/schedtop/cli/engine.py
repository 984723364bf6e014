"""What the commands that talk to a running engine share: options, one question and its answer, plain printing.

No command is declared here.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
import msgspec

from schedtop.control.client import Client
from schedtop.control.discovery import resolve
from schedtop.control.messages import Ack, AnyCommand, KnobsAck, SnapshotReply

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, None: 1.0}


class Duration(click.ParamType[float]):
    """`60`, `60s`, `500ms`, `2m`, `1h`; converts to seconds."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse; anything else is a usage error."""
        if isinstance(value, float | int):
            return float(value)
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration: write 60s, 500ms, 2m or 1h", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


DURATION = Duration()


def connect_option(command: Command) -> Command:
    """`--connect`: which engine."""
    return click.option("--connect", metavar="PATH|URL", help="Engine to talk to; default: the one that is running.")(
        command
    )


def json_option(command: Command) -> Command:
    """`--json`: for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")(command)


def reason_option(command: Command) -> Command:
    """`--reason`: for the audit log."""
    return click.option("--reason", default="", metavar="TEXT", help="Why, for the audit log.")(command)


def talk(connect: str | None, conversation: Callable[[Client], Awaitable[T]], read_only: bool = False) -> T:
    """Connect, hold a conversation, hang up. Raises `SchedtopError`, which the command line's root prints."""

    async def run() -> T:
        async with await Client.connect(resolve(connect), name="cli", read_only=read_only) as client:
            return await conversation(client)

    return asyncio.run(run())


def ask(connect: str | None, command: AnyCommand, timeout_s: float | None = 30.0) -> Ack | KnobsAck | SnapshotReply:
    """One command and its reply."""
    return talk(connect, lambda client: client.request(command, timeout_s))


def say_json(value: Any) -> None:
    """Print a value for programs: one line of JSON."""
    click.echo(msgspec.json.encode(value).decode())


def say_ack(ack: Ack, as_json: bool) -> None:
    """Print what a command found and did."""
    if as_json:
        say_json(ack)
        return
    if ack.found:
        click.echo(f"found: {plain(ack.found)}")
    click.echo(f"done: {plain(ack.did)} (step {ack.applied_at_step})")
    if ack.touched is not None:
        for request_id in ack.touched.unknown:
            click.echo(f"not live: {plain(request_id)}")


def plain(text: str) -> str:
    """Text from users made harmless for a terminal: control characters replaced.

    >>> plain("a\\x1b[31mb")
    'a?[31mb'
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], left: Iterable[int] = (0,)) -> str:
    """Columns as wide as their widest cell: those numbered in `left` to the left, the others to the right."""
    cells = [[plain(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(headings), *cells]) for column in range(len(headings))]
    aligned_left = frozenset(left)
    lines = []
    for row in [list(headings), *cells]:
        padded = [
            cell.ljust(width) if column in aligned_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
