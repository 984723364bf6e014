"""`schedtop knobs`: see, set, confirm and undo live settings."""

import click

from schedtop.cli.engine import (
    DURATION,
    ask,
    connect_option,
    json_option,
    plain,
    reason_option,
    say_ack,
    say_json,
    table,
    talk,
)
from schedtop.cli.values import KNOB_ASSIGNMENT, as_changes
from schedtop.control.client import Client
from schedtop.control.messages import Ack, ConfirmChange, GetSnapshot, KnobsAck, SetKnobs, SnapshotReply, UndoChange
from schedtop.engine.knobs import KnobSpec, KnobValue
from schedtop.engine.snapshot import NO_ROWS, Snapshot


@click.group(invoke_without_command=True)
@connect_option
@json_option
@click.pass_context
def knobs(ctx: click.Context, connect: str | None, as_json: bool) -> None:
    """Show the live settings; `knobs set` changes them."""
    if ctx.invoked_subcommand is None:
        show(connect, as_json)
    elif connect is not None or as_json:
        raise click.UsageError(f"put the options after {ctx.invoked_subcommand!r}")


@knobs.command(name="list")
@connect_option
@json_option
def list_knobs(connect: str | None, as_json: bool) -> None:
    """Each knob's value, range and meaning."""
    show(connect, as_json)


def show(connect: str | None, as_json: bool) -> None:
    """Print the knob table with the values of now."""
    specs, snapshot = talk(connect, _read, read_only=True)
    values = {spec.name: getattr(snapshot.knobs, spec.name) for spec in specs}
    if as_json:
        knobs = [{"name": spec.name, "value": values[spec.name], "spec": spec} for spec in specs]
        say_json({"generation": snapshot.generation, "step": snapshot.step, "knobs": knobs})
        return
    rows = [(spec.name, value_in_words(values[spec.name]), _range(spec), spec.unit, spec.summary) for spec in specs]
    click.echo(table(("knob", "value", "range", "unit", "meaning"), rows, left=(0, 3, 4)))
    click.echo(f"\ngeneration {snapshot.generation}; change with: schedtop knobs set NAME=VALUE")


async def _read(client: Client) -> tuple[list[KnobSpec], Snapshot]:
    reply = await client.request(GetSnapshot(viewport=NO_ROWS))
    assert isinstance(reply, SnapshotReply)
    return client.welcome.knobs, reply.update.snapshot


def value_in_words(value: KnobValue) -> str:
    """As `knobs set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _range(spec: KnobSpec) -> str:
    if spec.kind == "bool":
        return "true, false"
    if spec.choices:
        return ", ".join(spec.choices)
    return f"{spec.low:g} to {spec.high:g}" if spec.low is not None and spec.high is not None else ""


@knobs.command(name="set")
@click.argument("changes", type=KNOB_ASSIGNMENT, nargs=-1, required=True)
@click.option("--dry-run", is_flag=True, help="Check and answer, but change nothing.")
@click.option("--for", "confirm_within_s", type=DURATION, help="Roll back after this long, unless confirmed.")
@click.option("--expect-generation", type=int, metavar="N", help="Refuse if the knobs have changed since generation N.")
@reason_option
@connect_option
@json_option
def set_knobs(
    changes: tuple[tuple[str, KnobValue], ...],
    dry_run: bool,
    confirm_within_s: float | None,
    expect_generation: int | None,
    reason: str,
    connect: str | None,
    as_json: bool,
) -> None:
    """Change knobs, all or none, at the next step: NAME=VALUE ..."""
    command = SetKnobs(
        changes=as_changes(changes),
        dry_run=dry_run,
        confirm_within_s=confirm_within_s,
        expect_generation=expect_generation,
        reason=reason,
    )
    reply = ask(connect, command)
    _say(reply, as_json)
    if isinstance(reply, KnobsAck) and reply.confirm_by_mono is not None and not as_json:
        click.echo(f"rolls back by itself in {confirm_within_s:g} s unless confirmed: schedtop knobs confirm")


@knobs.command()
@click.argument("change_id", type=int, required=False)
@connect_option
@json_option
def confirm(change_id: int | None, connect: str | None, as_json: bool) -> None:
    """Keep a change that was made with --for; without a number, the one that waits."""
    ack = talk(connect, lambda client: _confirm(client, change_id))
    say_ack(ack, as_json)


async def _confirm(client: Client, change_id: int | None) -> Ack:
    if change_id is None:
        reply = await client.request(GetSnapshot(viewport=NO_ROWS))
        assert isinstance(reply, SnapshotReply)
        if reply.update.pending_change is None:
            raise click.ClickException("no change waits for confirmation")
        change_id = reply.update.pending_change.change_id
    ack = await client.request(ConfirmChange(change_id=change_id))
    assert isinstance(ack, Ack)
    return ack


@knobs.command()
@click.argument("change_id", type=int, required=False)
@reason_option
@connect_option
@json_option
def undo(change_id: int | None, reason: str, connect: str | None, as_json: bool) -> None:
    """Put back what a change replaced; without a number, the last one."""
    _say(ask(connect, UndoChange(change_id=change_id, reason=reason)), as_json)


def _say(reply: object, as_json: bool) -> None:
    assert isinstance(reply, KnobsAck)
    if as_json:
        say_json(reply)
        return
    for name, after in reply.after.items():
        before = reply.before[name]
        change = "unchanged" if before == after else f"{value_in_words(before)} -> {value_in_words(after)}"
        click.echo(f"{name}: {change}")
    for warning in reply.warnings:
        click.echo(f"warning: {plain(warning)}")
    if reply.dry_run:
        click.echo("dry run: nothing was changed")
    elif reply.change_id:
        click.echo(f"applied at step {reply.applied_at_step} (change {reply.change_id}, generation {reply.generation})")
    else:
        click.echo("nothing to do: the values were so already")
