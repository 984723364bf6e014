"""Recordings: whole after a crash, readable while they grow, and out again as tables."""

import csv
import io
import json
import os
import signal
import stat
import subprocess
import sys

import pytest
from click.testing import CliRunner

from schedtop.cli.main import cli
from schedtop.control import recorder
from schedtop.control.messages import EventBatch, Goodbye, Pause, Resume, SnapshotUpdate, Subscribe, Welcome
from schedtop.control.recorder import MAGIC, BadRecording, Recorded, Recording, RecordingWriter


def goodbye(number):
    return Recorded(wall=100.0 + number, mono=float(number), message=Goodbye(reason=f"g{number}"))


def write(path, *chunks):
    """One chunk per list of numbers."""
    with RecordingWriter(path) as writer:
        for numbers in chunks:
            for number in numbers:
                writer.add(goodbye(number))
            writer.flush()


def reasons(recording, first_chunk=0):
    return [entry.message.reason for entry in recording.read(first_chunk)]


def test_messages_come_back_in_order_with_their_times(folder):
    write(folder / "r", [0, 1], [2])
    recording = Recording(folder / "r")
    assert list(recording.read()) == [goodbye(0), goodbye(1), goodbye(2)]
    assert [chunk.wall for chunk in recording.chunks] == [100.0, 102.0]
    assert not recording.is_torn
    assert reasons(recording, first_chunk=1) == ["g2"]


def test_the_file_is_private(folder):
    write(folder / "r", [0])
    assert stat.S_IMODE((folder / "r").stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [1, 10, 24, 25, 40])
def test_a_torn_end_is_left_out_and_everything_before_it_read(folder, cut):
    write(folder / "r", [0, 1], [2], [3])
    whole = Recording(folder / "r")
    size = whole.chunks[-1].offset + cut
    os.truncate(folder / "r", size)
    torn = Recording(folder / "r")
    assert reasons(torn) == ["g0", "g1", "g2"]
    assert torn.is_torn


def test_a_flipped_bit_ends_the_reading_before_it(folder):
    write(folder / "r", [0], [1], [2])
    position = Recording(folder / "r").chunks[1].offset + 30
    data = bytearray((folder / "r").read_bytes())
    data[position] ^= 1
    (folder / "r").write_bytes(data)
    assert reasons(Recording(folder / "r")) == ["g0"]


def test_recording_again_drops_a_torn_end_and_appends(folder):
    write(folder / "r", [0], [1])
    with (folder / "r").open("ab") as file:
        file.write(b"torn")
    write(folder / "r", [2])
    recording = Recording(folder / "r")
    assert reasons(recording) == ["g0", "g1", "g2"]
    assert not recording.is_torn


def test_a_growing_recording_can_be_followed(folder):
    with RecordingWriter(folder / "r") as writer:
        writer.add(goodbye(0))
        writer.flush()
        recording = Recording(folder / "r")
        assert reasons(recording) == ["g0"]
        writer.add(goodbye(1))
        assert recording.refresh() == 0
        writer.flush()
        assert recording.refresh() == 1
        assert reasons(recording, first_chunk=1) == ["g1"]


def test_much_is_written_without_being_asked_for(folder, monkeypatch):
    monkeypatch.setattr(recorder, "CHUNK_BYTES", 200)
    with RecordingWriter(folder / "r") as writer:
        for number in range(20):
            writer.add(goodbye(number))
        assert len(Recording(folder / "r").chunks) > 2


@pytest.mark.parametrize("content", [b"\x00" * 100, b"something else entirely, a text", MAGIC[:5]])
def test_another_kind_of_file_is_neither_read_nor_touched(folder, content):
    (folder / "r").write_bytes(content)
    for open_it in (Recording, RecordingWriter):
        with pytest.raises(BadRecording, match="isn't a recording"):
            open_it(folder / "r")
    assert (folder / "r").read_bytes() == content


def test_a_length_gone_wild_asks_for_no_memory(folder):
    write(folder / "r", [0])
    with (folder / "r").open("ab") as file:
        file.write(b"\xff" * 24 + b"x" * 100)
    assert reasons(Recording(folder / "r")) == ["g0"]


_RECORD = """
import sys
from pathlib import Path
from schedtop.control.messages import Goodbye
from schedtop.control.recorder import Recorded, RecordingWriter
writer = RecordingWriter(Path(sys.argv[1]))
number = 0
while True:
    writer.add(Recorded(wall=0.0, mono=0.0, message=Goodbye(reason=f"g{number}")))
    writer.flush()
    print(number, flush=True)
    number += 1
"""


def test_what_was_flushed_survives_kill_9(folder):
    with subprocess.Popen(
        [sys.executable, "-c", _RECORD, str(folder / "r")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        flushed = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        flushed += [int(line) for line in process.stdout if line.endswith("\n")]
    found = reasons(Recording(folder / "r"))
    assert found[: len(flushed)] == [f"g{number}" for number in flushed]


async def test_a_live_engine_is_recorded_step_for_step(serve, make_request, folder):
    engine = serve()
    async with engine.client() as client:
        await client.request(Subscribe(interval_s=0.02))
        await client.request(Pause())
        await client.request(make_request("r1", 16, 30))
        await client.request(Resume())
        with RecordingWriter(folder / "r") as writer:
            writer.add(Recorded(wall=0.0, mono=0.0, message=client.welcome))
            async for message in client.messages():
                if isinstance(message, SnapshotUpdate):
                    writer.add(Recorded(wall=0.0, mono=0.0, message=message))
                    if any(record.step == 30 for record in message.steps):
                        break
    recording = Recording(folder / "r")
    assert [record.step for record in recording.steps()] == list(range(1, 31))
    assert isinstance(next(recording.read()).message, Welcome)


@pytest.fixture
def recorded(serve, folder):
    """`schedtop record` for a moment, while an engine is paused and resumed; the file."""
    engine = serve()
    path = folder / "rec"
    environment = {"SCHEDTOP_CONNECT": str(engine.path)}
    result = CliRunner().invoke(cli, ["record", str(path), "--interval", "20ms", "--for", "0.3s"], env=environment)
    assert result.exit_code == 0, result.output
    assert f"recording test into {path}" in result.output
    return path


def export(*arguments, status=0):
    result = CliRunner().invoke(cli, ["export", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.stdout


def test_record_and_export_by_command(recorded):
    lines = [json.loads(line) for line in export(recorded, "--what", "snapshots", "--format", "jsonl").splitlines()]
    assert len(lines) >= 2
    assert lines[0]["snapshot"]["num_running"] == 0
    assert export(recorded).startswith("step,mono,wall,duration_s,")
    assert (
        "snapshots have no flat form"
        in CliRunner().invoke(cli, ["export", str(recorded), "--what", "snapshots"]).output
    )


async def test_steps_and_events_are_exported_as_tables(serve, make_request, collect, folder):
    engine = serve()
    async with engine.client() as client:
        await client.request(Subscribe(interval_s=0.02))
        await client.request(make_request("=cmd()", 16, 5))
        with RecordingWriter(folder / "r") as writer:
            missing = {SnapshotUpdate, EventBatch}
            async for message in client.messages():
                if isinstance(message, SnapshotUpdate | EventBatch):
                    writer.add(Recorded(wall=0.0, mono=0.0, message=message))
                if isinstance(message, EventBatch) or any(record.step == 5 for record in getattr(message, "steps", [])):
                    missing.discard(type(message))
                if not missing:
                    break
    rows = list(csv.DictReader(io.StringIO(export(folder / "r"))))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert json.loads(rows[0]["ttft"])[0] >= 0
    events = list(csv.DictReader(io.StringIO(export(folder / "r", "--what", "events"))))
    assert events[0]["request_id"] == "'=cmd()", "a spreadsheet must not run it"


def test_an_engine_that_leaves_ends_the_recording_with_its_reason(serve, folder):
    engine = serve()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "schedtop", "record", str(folder / "r"), "--connect", str(engine.path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert "recording test" in process.stdout.readline()
    engine.server.stop()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == "schedtop: error: the recording ended: the engine is shutting down\n"
    last = list(Recording(folder / "r").read())[-1].message
    assert last == Goodbye(reason="the engine is shutting down")


def test_two_recorders_never_write_one_file(folder):
    with RecordingWriter(folder / "r") as first:
        with pytest.raises(BadRecording, match="being written by another recorder"):
            RecordingWriter(folder / "r")
        first.add(Recorded(wall=0.0, mono=0.0, message=Goodbye(reason="whole")))
    assert [entry.message.reason for entry in Recording(folder / "r").read()] == ["whole"]
    RecordingWriter(folder / "r").close()


@pytest.mark.parametrize(("output", "said"), [("r", "is the recording itself"), ("nowhere/x", "can't be written")])
def test_an_export_never_writes_over_its_recording_and_says_why_it_cant_write(folder, output, said):
    with RecordingWriter(folder / "r") as writer:
        writer.add(Recorded(wall=0.0, mono=0.0, message=Goodbye(reason="whole")))
    before = (folder / "r").read_bytes()
    result = CliRunner().invoke(cli, ["export", str(folder / "r"), "--output", str(folder / output)])
    assert result.exit_code != 0 and said in result.output and "Traceback" not in result.output
    assert (folder / "r").read_bytes() == before
