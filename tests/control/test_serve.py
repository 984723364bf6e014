"""`schedtop serve` as real processes: life, death and what is loaded."""

import asyncio
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from schedtop.control.client import Client
from schedtop.control.errors import CommandRefused, Disconnected
from schedtop.control.framing import MAX_PUBLISHED_BYTES, FrameReader, decode_from_server, encode_frame
from schedtop.control.messages import (
    Envelope,
    EventBatch,
    GetAudit,
    GetInfo,
    GetSnapshot,
    Goodbye,
    Hello,
    SetKnobs,
    SnapshotUpdate,
    Subscribe,
    TokenBatch,
)
from schedtop.engine.snapshot import FinishReason, Viewport

pytestmark = pytest.mark.e2e


class Serving:
    """A `schedtop serve` process and the lines it has printed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "schedtop" / "e.sock"
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder)}
        command = [sys.executable, "-P", "-m", "schedtop", "serve", "--name", "e", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str) -> str:
        """The next line that contains `text`."""
        seen = []
        while (line := self._lines.get(timeout=60)) is not None:
            seen.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in:\n{''.join(seen)}")

    def end(self) -> int:
        """Exit status, after its output is closed."""
        while self._lines.get(timeout=60) is not None:
            pass
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(folder):
    started = []

    def run(*options: str) -> Serving:
        serving = Serving(folder, *options)
        started.append(serving)
        serving.wait_for("socket")
        return serving

    yield run
    for serving in started:
        serving.kill()


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def gateway_of(serving: Serving) -> list[int]:
    children = Path(f"/proc/{serving.process.pid}/task/{serving.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


SLOW = ("--runner", "simulated", "--no-gateway")


def test_the_engine_process_loads_no_web_server_no_screen_and_without_a_model_no_torch():
    code = (
        "import sys; from schedtop.control.settings import ServeSettings; from schedtop.control import serve, build;"
        "build.build(ServeSettings(runner='fake')); build.build(ServeSettings(runner='simulated'));"
        "print([name for name in ('aiohttp', 'textual', 'torch', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_a_second_engine_of_the_same_name_refuses_in_one_line_and_the_first_goes_on(start, folder):
    first = start(*SLOW)
    second = Serving(folder, *SLOW)
    assert "a server is already running on" in second.wait_for("schedtop: error:")
    assert second.end() == 1
    second.kill()
    async with await Client.connect(str(first.socket), name="test"):
        pass


async def test_a_killed_engine_leaves_a_socket_that_the_next_one_takes_over_under_a_new_boot_id(start):
    first = start(*SLOW)
    async with await Client.connect(str(first.socket), name="test") as client:
        old = client.welcome.info.boot_id
        await client.request(SetKnobs(changes={"max_num_seqs": 3}))
        first.process.send_signal(signal.SIGKILL)
        last = [message async for message in client.messages()][-1]
        assert isinstance(last, Goodbye)
    first.end()
    assert first.socket.is_socket()
    second = start(*SLOW)
    async with await Client.connect(str(second.socket), name="test") as client:
        assert client.welcome.info.boot_id != old
        snapshot = (await client.request(GetSnapshot())).update.snapshot
        assert (snapshot.knobs.max_num_seqs, snapshot.generation) == (64, 0), "the start values are back"
        newest = (await client.request(GetAudit(limit=1))).data["rows"][0]
        assert (newest["boot_id"], newest["after"]) == (old, {"max_num_seqs": 3}), "and who had changed them is known"


ENDLESS = ("--max-model-len", "1000000", "--num-kv-blocks", "100000")


async def test_a82_at_the_end_short_streams_finish_new_ones_are_refused_and_a_second_signal_cuts_the_rest(
    start, make_request
):
    serving = start(*SLOW, *ENDLESS, "--drain", "3600")
    ends: dict[str, FinishReason] = {}
    details: dict[str, str] = {}
    was_told = was_refused = was_hurried = False
    async with await Client.connect(str(serving.socket), name="test") as client:
        await client.request(Subscribe(interval_s=0.02))
        for number in range(4):
            await client.request(make_request(f"short{number}", 16, 40))
        await client.request(make_request("long", 16, 900_000))
        serving.process.send_signal(signal.SIGTERM)
        async for message in client.messages():
            match message:
                case SnapshotUpdate() if message.shutting_down and not was_told:
                    was_told = True
                    with pytest.raises(CommandRefused) as refusal:
                        await client.request(make_request("late", 16, 4))
                    was_refused = refusal.value.code == "shutting_down"
                case TokenBatch():
                    for output in message.outputs:
                        if output.finish_reason is not None:
                            ends[output.request_id] = output.finish_reason
                            details[output.request_id] = output.detail
                case Goodbye():
                    assert message.reason == "the engine is shutting down"
                case _:
                    pass
            if was_told and len(ends) == 4 and not was_hurried:
                was_hurried = True
                serving.process.send_signal(signal.SIGTERM)
    assert was_refused
    assert ends == {**{f"short{number}": FinishReason.LENGTH for number in range(4)}, "long": FinishReason.ABORT}
    assert details["long"] == "the engine is shutting down"
    assert serving.end() == 0
    assert not serving.socket.exists()


async def test_a82_a_stream_that_outlasts_the_drain_gets_a_final_message(start, make_request):
    serving = start(*SLOW, *ENDLESS, "--drain", "0.2")
    async with await Client.connect(str(serving.socket), name="test") as client:
        await client.request(make_request("long", 16, 900_000))
        serving.process.send_signal(signal.SIGINT)
        batches = [message async for message in client.messages() if isinstance(message, TokenBatch)]
    assert batches[-1].outputs[-1].finish_reason is FinishReason.ABORT
    assert serving.end() == 0


async def test_with_no_room_for_the_audit_log_a_change_is_told_as_unrecorded_and_room_heals_it(start):
    serving = start(*SLOW)
    _, hard = resource.prlimit(serving.process.pid, resource.RLIMIT_FSIZE)
    async with await Client.connect(str(serving.socket), name="test") as client:
        resource.prlimit(serving.process.pid, resource.RLIMIT_FSIZE, (0, hard))  # as a full disk: no file grows
        with pytest.raises(CommandRefused, match=r"SetKnobs was done .*but the audit log couldn't be written") as told:
            await client.request(SetKnobs(changes={"max_num_seqs": 5}))
        assert told.value.code == "audit_failed"
        assert (await client.request(GetInfo())).data["audit"]["failure"]
        resource.prlimit(serving.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        ack = await client.request(SetKnobs(changes={"max_num_seqs": 6}))
        assert ack.before == {"max_num_seqs": 5}
        newest = (await client.request(GetAudit(limit=1))).data["rows"][0]
        assert newest["after"] == {"max_num_seqs": 6}
        assert (await client.request(GetInfo())).data["audit"]["failure"] == ""


def test_programs_are_told_in_json_where_the_engine_is(folder):
    serving = Serving(folder, *SLOW, "--json")
    up = json.loads(serving.wait_for("socket"))
    assert up["socket"] == str(serving.socket)
    assert up["info"]["name"] == "e"
    serving.process.send_signal(signal.SIGHUP)
    assert serving.end() == 0
    serving.kill()


def test_a_gateway_that_dies_is_started_again_and_ends_with_the_engine(start):
    serving = start("--runner", "fake", "--port", "0")
    serving.wait_for("gateway on http://127.0.0.1:")
    (first,) = gateway_of(serving)
    os.kill(first, signal.SIGKILL)
    serving.wait_for("the gateway ended with signal SIGKILL; next start in 0.5 s")
    serving.wait_for("gateway on http://127.0.0.1:")
    (second,) = gateway_of(serving)
    assert second != first
    serving.process.terminate()
    assert serving.end() == 0
    assert not is_running(second)


def test_a_taken_port_is_told_in_one_line_and_once_and_the_engine_goes_on_without_a_gateway(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        serving = start("--runner", "fake", "--port", str(port))
        line = serving.wait_for(str(port))
        assert line == f"schedtop: error: port {port} on 127.0.0.1 is taken; give --port\n"
        serving.wait_for("the gateway can't work with these settings: it isn't started again")
        assert gateway_of(serving) == []
        serving.process.terminate()
        assert serving.end() == 0


def test_a_gateway_does_not_outlive_a_killed_engine(start):
    serving = start("--runner", "fake", "--port", "0")
    serving.wait_for("gateway on")
    (gateway,) = gateway_of(serving)
    serving.process.kill()
    serving.end()  # reads until the gateway has closed the output it shares
    for _ in range(1000):
        if not is_running(gateway):
            return
        os.sched_yield()
    raise AssertionError("the gateway still runs")


_DIES = """
import sys
from pathlib import Path
from schedtop.control import build, serve
from schedtop.control.settings import ServeSettings
from schedtop.engine.core import EngineCore

def explode(self):
    raise RuntimeError("out of luck")

EngineCore.step = explode
settings = ServeSettings(runner="fake", gateway=False, socket=sys.argv[1], audit=sys.argv[1] + ".audit")
sys.exit(serve.serve(settings, lambda line: print(line, flush=True)))
"""


@pytest.fixture
def dying(folder):
    """An engine whose first step raises; its standard output is open."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _DIES, str(folder / "e.sock")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "engine" in process.stdout.readline()
        yield process
        process.kill()


async def test_a_dying_engine_ends_the_process_with_status_and_reason(dying, folder, make_request):
    async with await Client.connect(str(folder / "e.sock"), name="test") as client:
        submitting = asyncio.gather(client.request(make_request("r1")), return_exceptions=True)
        last = [message async for message in client.messages() if not isinstance(message, EventBatch)][-1]
        assert isinstance(last, Goodbye)
        assert last.reason == "the engine died: RuntimeError: out of luck"
        await submitting
        with pytest.raises(Disconnected, match="out of luck"):
            await client.request(GetSnapshot())
    assert "the engine died: RuntimeError: out of luck" in dying.stdout.read()
    assert dying.wait(60) == 1
    assert not (folder / "e.sock").exists()


def resident_bytes(pid: int) -> int:
    """RSS of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


MOST_ROWS = Viewport(running_rows=1000, waiting_rows=1000, kv_cells=4096)
"""What is allowed: 5,000 rows at once are refused."""


async def follow(client: Client, num_steps: int) -> list[int]:
    """The next `num_steps` steps or more, as a watcher that keeps up hears of them."""
    steps: list[int] = []
    async for message in client.messages():
        if isinstance(message, SnapshotUpdate):
            steps += [record.step for record in message.steps]
            if len(steps) >= num_steps:
                return steps
    raise AssertionError("the connection ended")


def newest_after(one: socket.socket, step: int) -> tuple[SnapshotUpdate, int]:
    """Read on until a snapshot of `step` or later: it, and how many snapshots came with it."""
    reader = FrameReader(MAX_PUBLISHED_BYTES)
    count = 0
    while data := one.recv(1 << 18):
        reader.feed(data)
        for frame in reader.frames():
            message = decode_from_server(frame)
            count += isinstance(message, SnapshotUpdate)
            if isinstance(message, SnapshotUpdate) and message.snapshot.step >= step:
                return message, count
    raise AssertionError("cut")


async def test_b15_ten_stalled_watchers_of_5000_requests_cost_the_process_less_than_8_mib_and_no_step(
    start, make_request
):
    serving = start(*SLOW, *ENDLESS, "--drain", "0")
    subscribe = Subscribe(interval_s=0.02, viewport=MOST_ROWS)
    stalled = [socket.socket(socket.AF_UNIX) for _ in range(10)]
    async with asyncio.timeout(300), await Client.connect(str(serving.socket), name="test") as client:
        await asyncio.gather(*(client.request(make_request(f"r{n}", 16, 900_000), None) for n in range(5000)))
        await client.request(subscribe)
        await follow(client, 100)  # by now the allocator has what making and sending such snapshots takes
        before = resident_bytes(serving.process.pid)
        for one in stalled:
            one.settimeout(60)
            one.connect(str(serving.socket))
            one.sendall(encode_frame(Hello(client="stalled")) + encode_frame(Envelope(id=1, command=subscribe)))
        steps = await follow(client, 400)
        growth = resident_bytes(serving.process.pid) - before
        read = [await asyncio.to_thread(newest_after, one, steps[-1]) for one in stalled]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert growth < 8 << 20
    assert all(update.snapshot.num_waiting + update.snapshot.num_running == 5000 for update, _ in read)
    assert max(count for _, count in read) < 20  # of the hundreds that were due meanwhile
    for one in stalled:
        one.close()


_SIGNALLED = """
import os, signal, sys
from schedtop.control import serve
from schedtop.control.settings import ServeSettings

depth = 0

def say(line):  # a print that a signal interrupts
    global depth
    depth += 1
    print("inside another print" if depth > 1 else line, flush=True)
    if "control socket" in line:
        os.kill(os.getpid(), signal.SIGTERM)
    depth -= 1

settings = ServeSettings(runner="fake", gateway=False, socket=sys.argv[1], audit=sys.argv[1] + ".audit")
sys.exit(serve.serve(settings, say))
"""


def test_a_signal_in_the_middle_of_a_print_ends_the_server_as_any_other_does(folder):
    command = [sys.executable, "-P", "-c", _SIGNALLED, str(folder / "e.sock")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "SIGTERM: running requests get 30 s to finish; again to cut them" in ended.stdout
    assert "inside another print" not in ended.stdout
    assert ended.returncode == 0
    assert not (folder / "e.sock").exists()


async def test_a82_a_client_of_the_gateway_that_does_not_read_does_not_hold_up_the_end(start):
    serving = start("--runner", "fake", "--port", "0", *ENDLESS, "--drain", "0")
    host, _, port = serving.wait_for("gateway on http://").split("http://")[1].strip().rpartition(":")
    body = json.dumps({"model": "fake", "prompt": "a", "max_tokens": 900_000, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    while True:
        reader, writer = await asyncio.open_connection(host, int(port), limit=64)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        if b" 503 " not in (status := await reader.readline()):
            break
        writer.transport.abort()  # the gateway looks for the engine yet
    assert b" 200 " in status
    (gateway,) = gateway_of(serving)
    serving.process.terminate()
    assert await asyncio.to_thread(serving.end) == 0
    assert not is_running(gateway)
    writer.transport.abort()
