"""Operations on the whole engine: pause, resume, drain, reset-cache, self-check."""

import sys
from typing import Literal

import click

from schedtop.cli.engine import DURATION, ask, connect_option, json_option, plain, reason_option, say_ack
from schedtop.control.messages import Ack, AnyCommand, Drain, Pause, ResetPrefixCache, Resume, SelfCheck


def _do(connect: str | None, command: AnyCommand, as_json: bool, timeout_s: float | None = 30.0) -> Ack:
    ack = ask(connect, command, timeout_s)
    assert isinstance(ack, Ack)
    say_ack(ack, as_json)
    return ack


@click.command()
@click.option(
    "--mode",
    type=click.Choice(["abort", "wait", "keep"]),
    default="keep",
    show_default=True,
    help="abort: end everything; wait: let what runs finish, admit nobody; keep: freeze as it is.",
)
@reason_option
@connect_option
@json_option
def pause(mode: Literal["abort", "wait", "keep"], reason: str, connect: str | None, as_json: bool) -> None:
    """Stop scheduling."""
    _do(connect, Pause(mode=mode, reason=reason), as_json)


@click.command()
@reason_option
@connect_option
@json_option
def resume(reason: str, connect: str | None, as_json: bool) -> None:
    """Go on after a pause or a drain."""
    _do(connect, Resume(reason=reason), as_json)


@click.command()
@click.option("--limit", type=DURATION, help="Give up after this long. [never]")
@reason_option
@connect_option
@json_option
def drain(limit: float | None, reason: str, connect: str | None, as_json: bool) -> None:
    """Let what runs end and admit nobody new. Exit status 1 if something is left.

    However it ends, the engine stays so until `schedtop resume`; requests that arrive meanwhile wait.
    """
    timeout_s = None if limit is None else limit + 30.0
    ack = _do(connect, Drain(limit_s=limit, reason=reason), as_json, timeout_s)
    if not ack.data.get("drained"):
        sys.exit(1)


@click.command(name="reset-cache")
@click.option("--preempt-running", is_flag=True, help="Throw running requests back first, so that their blocks count.")
@reason_option
@connect_option
@json_option
def reset_cache(preempt_running: bool, reason: str, connect: str | None, as_json: bool) -> None:
    """Forget all cached prefixes."""
    _do(connect, ResetPrefixCache(preempt_running=preempt_running, reason=reason), as_json)


@click.command(name="self-check")
@connect_option
@json_option
def self_check(connect: str | None, as_json: bool) -> None:
    """Prove block and reference accounting on the live engine. Exit status 1 for a fault."""
    ack = _do(connect, SelfCheck(), as_json)
    faults = ack.data.get("faults", [])
    if not as_json:
        for fault in faults:
            click.echo(f"fault: {plain(fault)}")
    if faults:
        sys.exit(1)
