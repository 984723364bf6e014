"""The client: replies to whoever asked, the rest in `messages()`, and a clear word when the connection is gone."""

import asyncio
import contextlib

import pytest

from schedtop.control import client as clients
from schedtop.control.client import Client, CommandRefused, Disconnected, NoReply
from schedtop.control.framing import decode_from_client, encode, encode_frame
from schedtop.control.measures import Peaks
from schedtop.control.messages import (
    Ack,
    EngineInfo,
    Envelope,
    ErrorReply,
    EventBatch,
    GetInfo,
    Goodbye,
    Hello,
    NoteRefusal,
    Resume,
    SnapshotUpdate,
    TokenBatch,
    TokenOutput,
    Welcome,
)
from schedtop.engine.snapshot import EngineCoreEvent, EventKind

WELCOME = Welcome(
    protocol=1, info=EngineInfo(name="e", model="m", boot_id="b", pid=1, version="0"), knobs=[], capabilities=[]
)


class FakeStream:
    """`FrameStream` whose other end is the test."""

    def __init__(self):
        self.sent = []
        self.has_sent = asyncio.Event()
        self._incoming = asyncio.Queue()
        self.is_closed = False

    async def send(self, body):
        self.sent.append(decode_from_client(body))
        self.has_sent.set()

    async def receive(self):
        item = await self._incoming.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def close(self):
        self.is_closed = True

    def give(self, *messages):
        for message in messages:
            self._incoming.put_nowait(message if isinstance(message, Exception | bytes) else encode(message))


@pytest.fixture
async def stream():
    return FakeStream()


@pytest.fixture
async def client(stream):
    client = Client(stream, WELCOME)
    yield client
    await client.close()


async def sent(stream, count):
    while len(stream.sent) < count:
        stream.has_sent.clear()
        await stream.has_sent.wait()
    return stream.sent


async def test_replies_find_their_question_in_any_order(client, stream):
    first, second = (asyncio.create_task(client.request(Resume())) for _ in range(2))
    numbers = [envelope.id for envelope in await sent(stream, 2)]
    stream.give(*(Ack(id=number, applied_at_step=number) for number in reversed(numbers)))
    assert [(await task).applied_at_step for task in (first, second)] == numbers


async def test_a_refusal_is_raised_with_its_code(client, stream):
    task = asyncio.create_task(client.request(Resume()))
    (envelope,) = await sent(stream, 1)
    stream.give(ErrorReply(id=envelope.id, code="conflict", message="somebody was faster"))
    with pytest.raises(CommandRefused, match="somebody was faster") as refusal:
        await task
    assert refusal.value.code == "conflict"


async def test_for_whom_a_command_is_sent_goes_with_it(client, stream):
    task = asyncio.create_task(client.request(Resume(), on_behalf_of="ops"))
    (envelope,) = await sent(stream, 1)
    assert envelope == Envelope(id=envelope.id, command=Resume(), on_behalf_of="ops")
    stream.give(Ack(id=envelope.id, applied_at_step=0))
    await task


async def test_no_answer_in_time_is_told_as_unknown(client):
    with pytest.raises(NoReply, match=r"no reply to Resume within 0.01 s; it may still take effect"):
        await client.request(Resume(), timeout_s=0.01)


async def test_a_late_reply_disturbs_nobody(client, stream):
    with pytest.raises(NoReply):
        await client.request(Resume(), timeout_s=0.01)
    stream.give(Ack(id=stream.sent[0].id, applied_at_step=0))
    task = asyncio.create_task(client.request(GetInfo()))
    await sent(stream, 2)
    stream.give(Ack(id=stream.sent[1].id, applied_at_step=5))
    assert (await task).applied_at_step == 5


async def test_goodbye_ends_everything_with_its_reason(client, stream):
    task = asyncio.create_task(client.request(Resume()))
    await sent(stream, 1)
    stream.give(Goodbye(reason="shutting down"))
    with pytest.raises(Disconnected, match="shutting down"):
        await task
    assert [message async for message in client.messages()] == [Goodbye(reason="shutting down")]
    with pytest.raises(Disconnected, match="shutting down"):
        await client.request(Resume())


@pytest.mark.parametrize("end", [Disconnected("the connection broke"), b"\xc1"])
async def test_a_broken_connection_ends_with_a_made_up_goodbye(client, stream, end):
    stream.give(end)
    (last,) = [message async for message in client.messages()]
    assert isinstance(last, Goodbye)
    assert "the connection broke" in last.reason or "can't read" in last.reason


def event(sequence):
    return EngineCoreEvent(sequence=sequence, kind=EventKind.QUEUED, step=0, mono=0.0, wall=0.0)


async def taken(client, stream, *messages):
    """What a consumer finds that comes back after all `messages` have arrived."""
    stream.give(*messages, Goodbye(reason="end"))
    await client._reader
    return [message async for message in client.messages()][:-1]


async def test_a_consumer_that_was_away_gets_joined_tokens_and_events(client, stream):
    found = await taken(
        client,
        stream,
        TokenBatch(step=1, outputs=[TokenOutput("a", [1])]),
        EventBatch(events=[event(1)]),
        TokenBatch(step=2, outputs=[TokenOutput("a", [2])]),
        EventBatch(events=[event(2)], dropped=3),
    )
    assert found == [
        TokenBatch(step=2, outputs=[TokenOutput("a", [1, 2])]),
        EventBatch(events=[event(1), event(2)], dropped=3),
    ]


async def test_a_consumer_that_was_away_gets_the_newest_snapshot_and_all_steps(serve, make_request, collect):
    engine = serve()
    async with engine.client() as real:
        await real.request(make_request("r1", 16, 3))
        await collect(real, "r1")
        update = await engine.update(real)
    records = engine.core.recent_steps(3)
    stream = FakeStream()
    client = Client(stream, WELCOME)
    high = Peaks(num_steps=1, running=1, waiting=30, blocks_in_use=2)
    low = Peaks(num_steps=2, running=3, waiting=0, blocks_in_use=1)
    older = SnapshotUpdate(snapshot=update.snapshot, steps=records[:1], peaks=high)
    newer = SnapshotUpdate(snapshot=update.snapshot, steps=records[1:], shutting_down=True, peaks=low)
    (found,) = await taken(client, stream, older, newer)
    assert found.shutting_down
    assert found.steps == records
    assert found.peaks == Peaks(num_steps=3, running=3, waiting=30, blocks_in_use=2)
    await client.close()


async def test_nobody_at_the_path_is_told_with_the_path(folder):
    with pytest.raises(Disconnected, match=r"no engine answers on .*none.sock.*is it running"):
        await Client.connect(str(folder / "none.sock"), name="test")


async def test_a_path_too_long_for_a_socket_is_told_with_its_length(folder):
    path = str(folder / ("x" * 150))
    with pytest.raises(Disconnected, match=f"has {len(path)} bytes, the limit is 107"):
        await Client.connect(path, name="test")


async def test_a_server_that_never_answers_is_given_up(folder):
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, folder / "s.sock")
    with pytest.raises(Disconnected, match=r"didn't answer within 0.05 s"):
        await Client.connect(str(folder / "s.sock"), name="test", timeout_s=0.05)
    server.close()
    await server.wait_closed()


async def test_a_client_can_leave_a_server_that_has_stopped_reading(folder, monkeypatch):
    monkeypatch.setattr(clients, "CLOSE_LIMIT_S", 0.01)

    ends = []

    async def greet_and_read_no_more(reader, writer):
        ends.append(writer)
        await reader.readexactly(4)
        writer.write(encode_frame(WELCOME))
        writer.transport.pause_reading()

    path = folder / "stopped.sock"
    async with asyncio.timeout(60), await asyncio.start_unix_server(greet_and_read_no_more, path):
        client = await Client.connect(str(path), name="test")
        note = NoteRefusal(action="x", detail="y" * 4_000_000)
        sending = asyncio.create_task(client.request(note, None))
        await asyncio.sleep(0)
        assert client._stream._writer.transport.get_write_buffer_size()
        await client.close()
        with pytest.raises(Disconnected):
            await sending
        ends[0].transport.abort()
        with contextlib.suppress(OSError):
            await ends[0].wait_closed()


async def test_a_read_only_client_is_greeted_as_one(serve):
    engine = serve()
    async with engine.client(read_only=True) as client:
        assert client.welcome.read_only
        with pytest.raises(CommandRefused, match="read-only"):
            await client.request(Resume())


def test_the_greeting_introduces_by_name():
    assert decode_from_client(encode(Hello(client="tui"))) == Hello(client="tui")
