"""`schedtop requests`: list live requests, and act on those that are named or match."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from schedtop.cli.engine import ask, connect_option, json_option, reason_option, say_ack, say_json, table
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AnyCommand,
    GetSnapshot,
    HoldRequests,
    PreemptRequests,
    ReleaseRequests,
    RequestFilter,
    SetMaxTokens,
    SetPriority,
    SnapshotReply,
)
from schedtop.engine.snapshot import RequestRow, Snapshot, Viewport

MAX_ROWS = 1000
Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(invoke_without_command=True)
@click.option("--limit", type=click.IntRange(1, MAX_ROWS), default=50, show_default=True, help="Rows of each queue.")
@click.option("--contains", default="", metavar="TEXT", help="Only ids that contain this (!TEXT: that don't).")
@click.option("--sort", default="", metavar="FIELD", help="Sort by this field of a request.")
@connect_option
@json_option
@click.pass_context
def requests(ctx: click.Context, limit: int, contains: str, sort: str, connect: str | None, as_json: bool) -> None:
    """List live requests, running ones first; the subcommands act on them.

    Priority: lower numbers run first.
    """
    if ctx.invoked_subcommand is not None:
        if connect is not None or as_json:
            raise click.UsageError(f"put the options after {ctx.invoked_subcommand!r}")
        return
    view = Viewport(running_rows=limit, waiting_rows=limit, id_contains=contains, sort=sort)
    reply = ask(connect, GetSnapshot(viewport=view))
    assert isinstance(reply, SnapshotReply)
    snapshot = reply.update.snapshot
    if as_json:
        say_json({"step": snapshot.step, "running": snapshot.running, "waiting": snapshot.waiting})
        return
    _print(snapshot)


def _print(snapshot: Snapshot) -> None:
    rows = [*snapshot.running, *snapshot.waiting]
    if rows:
        headings = ("id", "status", "prio", "prompt", "output", "max", "blocks", "preempted", "age s", "why it waits")
        click.echo(table(headings, [_cells(row, snapshot.mono) for row in rows], left=(0, 1, 9)))
    hidden = snapshot.num_running + snapshot.num_waiting - len(rows)
    more = f" ({hidden} not shown)" if hidden else ""
    click.echo(f"{snapshot.num_running} running, {snapshot.num_waiting} waiting at step {snapshot.step}{more}")


def _cells(row: RequestRow, now: float) -> tuple[object, ...]:
    why = f"{row.wait_reason}: {row.wait_detail}" if row.wait_detail else str(row.wait_reason or "")
    return (
        row.request_id, row.status, row.priority, row.num_prompt_tokens, row.num_output_tokens, row.max_tokens,
        row.num_blocks, row.num_preemptions, f"{now - row.arrived:.1f}", why,
    )  # fmt: skip


def _selecting(command: Command) -> Command:
    """Ids and filters; all given must hold."""
    for decorate in (
        click.argument("ids", nargs=-1),
        click.option("--id-prefix", metavar="TEXT", help="Ids that begin with this."),
        click.option("--priority-at-least", type=int, metavar="N", help="Priority value N or larger (less urgent)."),
        click.option("--priority-at-most", type=int, metavar="N", help="Priority value N or smaller (more urgent)."),
        click.option("--status", help="waiting, deferred, running or preempted."),
        click.option("--submitted-by", metavar="NAME", help="Of this token, or of the client of this name."),
        reason_option,
        connect_option,
        json_option,
    ):
        command = decorate(command)
    return command


def _act(make: Callable[[RequestFilter, str], AnyCommand], selection: dict[str, Any]) -> None:
    """Send a command about the selected requests and print what it found and did."""
    connect, as_json, reason = selection.pop("connect"), selection.pop("as_json"), selection.pop("reason")
    select = RequestFilter(**{**selection, "ids": list(selection["ids"])})
    if select == RequestFilter():
        raise click.UsageError(
            "say which requests: ids, --id-prefix, --priority-at-least/-most, --status or --submitted-by"
        )
    ack = ask(connect, make(select, reason))
    assert isinstance(ack, Ack)
    say_ack(ack, as_json)


@requests.command()
@_selecting
def abort(**selection: Any) -> None:
    """End requests."""
    _act(lambda select, reason: AbortRequests(select=select, reason=reason), selection)


@requests.command()
@click.option("--to", "priority", type=int, required=True, metavar="N", help="The new priority; lower runs first.")
@_selecting
def priority(priority: int, **selection: Any) -> None:
    """Change the priority of requests."""
    _act(lambda select, reason: SetPriority(select=select, priority=priority, reason=reason), selection)


@requests.command()
@_selecting
def preempt(**selection: Any) -> None:
    """Throw running requests back to the queue; they are computed again later."""
    _act(lambda select, reason: PreemptRequests(select=select, reason=reason), selection)


@requests.command()
@_selecting
def hold(**selection: Any) -> None:
    """Keep requests from being scheduled until released."""
    _act(lambda select, reason: HoldRequests(select=select, reason=reason), selection)


@requests.command()
@_selecting
def release(**selection: Any) -> None:
    """Undo a hold."""
    _act(lambda select, reason: ReleaseRequests(select=select, reason=reason), selection)


@requests.command(name="max-tokens")
@click.option("--to", "max_tokens", type=int, required=True, metavar="N", help="Tokens they may generate in all.")
@_selecting
def set_max_tokens(max_tokens: int, **selection: Any) -> None:
    """Change how many tokens live requests may generate."""
    _act(lambda select, reason: SetMaxTokens(select=select, max_tokens=max_tokens, reason=reason), selection)
