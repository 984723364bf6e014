"""`schedtop record` and `schedtop export`: an engine's flight recorder to a file, and out of it again."""

import asyncio
import contextlib
import csv
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

import click
import msgspec

from schedtop.cli.engine import DURATION, connect_option
from schedtop.control.client import Client
from schedtop.control.discovery import resolve
from schedtop.control.messages import EventBatch, Goodbye, SnapshotUpdate, Subscribe, Welcome
from schedtop.control.recorder import Recorded, Recording, RecordingWriter
from schedtop.engine.snapshot import StepRecord, Viewport

FLUSH_S = 1.0
"""At most so much of a recording is lost when the recorder is killed."""


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--interval", type=DURATION, default=0.5, show_default=True, help="Between snapshots.")
@click.option("--rows", type=click.IntRange(0, 1000), default=64, show_default=True, help="Requests of each queue.")
@click.option("--kv-cells", type=click.IntRange(0, 4096), default=256, show_default=True, help="Cells of the KV map.")
@click.option("--for", "for_s", type=DURATION, help="Stop after this long. [until Ctrl-C]")
@connect_option
def record(file: Path, interval: float, rows: int, kv_cells: int, for_s: float | None, connect: str | None) -> None:
    """Record every step, event and snapshot of an engine into FILE, until Ctrl-C. An existing recording goes on."""
    subscription = Subscribe(
        interval_s=interval, viewport=Viewport(running_rows=rows, waiting_rows=rows, kv_cells=kv_cells)
    )
    with RecordingWriter(file) as writer:
        reason = asyncio.run(_record(resolve(connect), writer, subscription, for_s))
    click.echo(f"{file}: {_in_words(Recording(file))}")
    if reason is not None:
        raise click.ClickException(f"the recording ended: {reason}")


async def _record(target: str, writer: RecordingWriter, subscription: Subscribe, for_s: float | None) -> str | None:
    """Record until a signal or the time is over (None), or the engine's goodbye (its reason)."""
    async with await Client.connect(target, name="recorder", read_only=True) as client:
        writer.add(_now(client.welcome))
        await client.request(subscription)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        reading = asyncio.create_task(_read(client, writer))
        stopping = asyncio.create_task(stop.wait())
        click.echo(f"recording {client.welcome.info.name} into {writer.path}; Ctrl-C ends it")
        done, _ = await asyncio.wait((reading, stopping), timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if reading in done:
            return reading.result()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        return None


async def _read(client: Client, writer: RecordingWriter) -> str:
    flushed_at = time.monotonic()
    async for message in client.messages():
        if isinstance(message, SnapshotUpdate | EventBatch | Goodbye):
            writer.add(_now(message))
        if time.monotonic() - flushed_at >= FLUSH_S:
            writer.flush()
            flushed_at = time.monotonic()
        if isinstance(message, Goodbye):
            return message.reason
    raise AssertionError("a client's messages end with a goodbye")


def _now(message: Welcome | SnapshotUpdate | EventBatch | Goodbye) -> Recorded:
    return Recorded(wall=time.time(), mono=time.monotonic(), message=message)


def _in_words(recording: Recording) -> str:
    num_steps = sum(1 for _ in recording.steps())
    torn = ", its end is torn" if recording.is_torn else ""
    return f"{num_steps} steps in {len(recording.chunks)} chunks, {recording.end} bytes{torn}"


# ---- export -----------------------------------------------------------------------------------------------------


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--what", type=click.Choice(["steps", "events", "snapshots"]), default="steps", show_default=True)
@click.option("--format", "form", type=click.Choice(["csv", "jsonl"]), default="csv", show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write there. [standard output]")
def export(
    file: Path,
    what: Literal["steps", "events", "snapshots"],
    form: Literal["csv", "jsonl"],
    output: Path | None,
) -> None:
    """Turn a recording into CSV or JSON lines: one row per step, event or snapshot."""
    if what == "snapshots" and form == "csv":
        raise click.UsageError("snapshots have no flat form: use --format jsonl")
    recording = Recording(file)
    if output is not None and output.exists() and output.samefile(file):
        raise click.UsageError(f"--output {output} is the recording itself: give another file")
    items = _items(recording, what)
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(output.open("w", newline="")) if output else sys.stdout
        except OSError as error:
            raise click.ClickException(f"{output} can't be written: {error.strerror}") from None
        if form == "csv":
            _write_csv(items, StepRecord.__struct_fields__ if what == "steps" else _EVENT_FIELDS, stream)
        else:
            for item in items:
                stream.write(msgspec.json.encode(item).decode() + "\n")
    if recording.is_torn:
        click.echo(f"{file}: its end is torn; everything before it was exported", err=True)


_EVENT_FIELDS = ("sequence", "kind", "step", "mono", "wall", "request_id", "detail", "preemption", "changes")


def _items(recording: Recording, what: str) -> Iterator[Any]:
    """Dictionaries, so that field names stand in every form."""
    if what == "steps":
        for step in recording.steps():
            yield {name: getattr(step, name) for name in StepRecord.__struct_fields__}
        return
    for entry in recording.read():
        if what == "events" and isinstance(entry.message, EventBatch):
            yield from (msgspec.to_builtins(event) for event in entry.message.events)
        elif what == "snapshots" and isinstance(entry.message, SnapshotUpdate):
            yield {"wall": entry.wall, **msgspec.to_builtins(entry.message)}


def _write_csv(items: Iterator[Any], fields: tuple[str, ...], stream: TextIO) -> None:
    """Lists and maps stand in their cell as JSON; a text that a spreadsheet would run as a formula is quoted."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(fields)
    for item in items:
        writer.writerow([_cell(item.get(name)) for name in fields])


def _cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value
