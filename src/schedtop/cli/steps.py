"""`schedtop steps`: the newest records of the engine's flight recorder, without a recording."""

import datetime

import click
import msgspec

from schedtop.cli.engine import ask, connect_option, json_option, say_json, table
from schedtop.control.messages import Ack, DumpSteps
from schedtop.engine.snapshot import StepRecord

MAX_STEPS = 4096
_HEADINGS = (
    "step", "at", "ms", "forward", "decode", "prefill", "running", "waiting", "free blocks", "preempted", "limited by"
)  # fmt: skip


@click.command()
@click.option("--last", type=click.IntRange(1, MAX_STEPS), default=20, show_default=True, help="So many.")
@connect_option
@json_option
def steps(last: int, connect: str | None, as_json: bool) -> None:
    """Show the last steps, the newest last: duration, tokens of decodes and prompts, queues, free blocks.

    As JSON: all that the flight recorder holds of each. `schedtop record` writes what comes from now on.
    """
    ack = ask(connect, DumpSteps(count=last))
    assert isinstance(ack, Ack)
    records = msgspec.convert(ack.data["steps"], list[StepRecord])
    if as_json:
        say_json([{name: getattr(record, name) for name in record.__struct_fields__} for record in records])
    elif records:
        click.echo(table(_HEADINGS, map(_cells, records), left=(1, 10)))
    else:
        click.echo("no step has ended yet")


def _cells(record: StepRecord) -> tuple[object, ...]:
    at = datetime.datetime.fromtimestamp(record.wall).strftime("%H:%M:%S.%f")[:-3]
    return (
        record.step, at, f"{record.duration_s * 1e3:.1f}", f"{record.forward_s * 1e3:.1f}", record.num_decode_tokens,
        record.num_prefill_tokens, record.num_running, record.num_waiting, record.blocks_free, record.num_preempted,
        record.limited_by,
    )  # fmt: skip
