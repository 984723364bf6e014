"""Watchers: what they get, at whose pace, and what happens to one that doesn't read."""

import asyncio
import socket

import pytest

from schedtop.control import connection as connections
from schedtop.control import server as servers
from schedtop.control import watchers
from schedtop.control.errors import CommandRefused
from schedtop.control.framing import MAX_PUBLISHED_BYTES, FrameReader, decode_from_server, encode_frame
from schedtop.control.messages import (
    Ack,
    DumpSteps,
    Envelope,
    ErrorReply,
    EventBatch,
    GetInfo,
    GetSnapshot,
    Goodbye,
    Hello,
    HoldRequests,
    Pause,
    RequestFilter,
    Resume,
    SetKnobs,
    SnapshotUpdate,
    Subscribe,
    TokenBatch,
    Welcome,
)
from schedtop.engine.snapshot import RequestRow, Viewport


class RawClient:
    """A client that reads only when told to: what a stopped or broken program looks like to the server."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(str(path))
        self._reader = FrameReader(MAX_PUBLISHED_BYTES)
        self._ready = []

    def send(self, *messages):
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def read(self):
        """The next message; None at the end of the connection."""
        while not self._ready:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._reader.feed(data)
            self._ready += [decode_from_server(frame) for frame in self._reader.frames()]
        return self._ready.pop(0)

    def read_until(self, kind):
        while (message := self.read()) is not None:
            if isinstance(message, kind):
                return message
        return None


@pytest.fixture
def raw():
    """Connect without an asyncio client: `raw(engine, command, ...)` greets and sends the commands."""
    opened = []

    def connect(engine, *commands):
        client = RawClient(engine.path)
        opened.append(client)
        client.send(Hello(client="raw"), *(Envelope(id=n, command=c) for n, c in enumerate(commands, start=1)))
        assert isinstance(client.read(), Welcome)
        return client

    yield connect
    for client in opened:
        client.socket.close()


async def steps_later(engine, client, count):
    first = (await engine.snapshot(client)).step
    while (await engine.snapshot(client)).step < first + count:
        pass


async def submit_many(client, make_request, count):
    await asyncio.gather(*(client.request(make_request(f"r{number}", 16, 2000)) for number in range(count)))


async def test_a_subscriber_gets_every_step_once_and_in_order(serve, make_request, next_message):
    engine = serve()
    async with engine.client() as client:
        await client.request(Subscribe(interval_s=0.02))
        await client.request(make_request("r1", 16, 200))
        steps: list[int] = []
        while 200 not in steps:
            update = await next_message(client, SnapshotUpdate)
            steps += [record.step for record in update.steps]
    assert steps == list(range(1, len(steps) + 1))


async def test_a50_a_burst_between_two_looks_is_seen_in_the_peaks_of_the_second(serve, make_request, collect):
    engine = serve()
    names = [f"r{number}" for number in range(30)]
    async with engine.client() as looks, engine.client() as other:
        assert (await engine.update(looks)).peaks is None
        await other.request(Pause())
        await asyncio.gather(*(other.request(make_request(name, 16, 10)) for name in names))
        await other.request(Resume())
        await collect(other, *names)
        update, again = await engine.update(looks), await engine.update(looks)
    assert update.snapshot.num_running == update.snapshot.num_waiting == 0
    assert (update.peaks.running, update.peaks.waiting) == (8, 22)
    assert update.peaks.blocks_in_use >= 8
    assert update.peaks.num_steps == len(engine.core.recent_steps(4096))
    assert again.peaks is None


async def test_a50_each_subscriber_has_the_peaks_since_its_own_last_snapshot(serve, make_request, collect, raw):
    engine = serve()
    slow, quick = raw(engine, Subscribe(interval_s=3600.0)), raw(engine, Subscribe(interval_s=0.02, steps=False))
    assert slow.read_until(SnapshotUpdate).peaks is None
    async with engine.client() as client:
        for name in ("r1", "r2"):
            await client.request(make_request(name, 16, 10))
            await collect(client, name)
        num_seen = 0
        while num_seen < 20:
            peaks = quick.read_until(SnapshotUpdate).peaks
            num_seen += peaks.num_steps if peaks is not None else 0
        slow.send(Envelope(id=2, command=Subscribe(interval_s=3600.0)))  # gives one at once
        peaks = slow.read_until(SnapshotUpdate).peaks
    assert num_seen == 20
    assert (peaks.num_steps, peaks.running) == (20, 1)


async def test_a_poll_looks_at_no_subscription_before_one_is_due(serve, brisk_runner, make_request, raw, monkeypatch):
    engine = serve(brisk_runner)
    looked = []
    look = watchers._wants_snapshot
    monkeypatch.setattr(watchers, "_wants_snapshot", lambda connection: (looked.append(1), look(connection))[1])
    waiting = [raw(engine, Subscribe(interval_s=3600.0)) for _ in range(5)]
    for one in waiting:
        one.read_until(SnapshotUpdate)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 3000))
        await steps_later(engine, client, 5)
        looked.clear()
        await steps_later(engine, client, 200)
        assert looked == []


async def test_an_idle_engine_still_tells_its_time(serve, next_message):
    engine = serve()
    async with engine.client() as client:
        await client.request(Subscribe(interval_s=0.02))
        times = [(await next_message(client, SnapshotUpdate)).snapshot.mono for _ in range(3)]
    assert times == sorted(set(times))


async def test_a_subscription_is_replaced_and_ended(serve, next_message):
    engine = serve()
    async with engine.client() as client:
        await client.request(Subscribe(interval_s=0.02, viewport=Viewport(kv_cells=10)))
        assert (await next_message(client, SnapshotUpdate)).snapshot.kv_map is not None
        await client.request(Subscribe(interval_s=0.02))
        await next_message(client, SnapshotUpdate, lambda update: update.snapshot.kv_map is None)
        await client.request(Subscribe(interval_s=None))
        await engine.snapshot(client)
        await client.request(Pause())
        assert isinstance(await next_message(client, EventBatch), EventBatch)


async def test_latencies_come_with_a_snapshot(serve, make_request, collect):
    engine = serve()
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 10))
        await collect(client, "r1")
        latencies = (await engine.update(client)).latencies
    assert set(latencies) == {"ttft", "itl", "e2e", "queue", "step"}
    assert latencies["ttft"].now.count == 1
    assert latencies["itl"].now.count == 9
    assert latencies["step"].now.count == 10


@pytest.mark.parametrize(
    ("viewport", "complaint"),
    [
        ({"running_rows": 1001}, "running_rows=1001 is outside its range 0 to 1000"),
        ({"waiting_offset": -1}, "waiting_offset=-1"),
        ({"kv_cells": -5}, "kv_cells=-5"),
        ({"sort": "__class__"}, "sort='__class__' is no field of a request"),
    ],
)
async def test_a_viewport_that_makes_no_sense_is_refused(serve, viewport, complaint):
    engine = serve()
    async with engine.client() as client:
        for command in (GetSnapshot(viewport=Viewport(**viewport)), Subscribe(viewport=Viewport(**viewport))):
            with pytest.raises(CommandRefused) as refusal:
                await client.request(command)
            assert complaint in refusal.value.message


@pytest.mark.parametrize("interval", [0.0, 0.001, -1.0, 1e9, float("nan")])
async def test_an_interval_out_of_range_is_refused(serve, interval):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="interval_s"):
            await client.request(Subscribe(interval_s=interval))


async def test_every_field_of_a_row_can_be_sorted_by(serve, make_request):
    engine = serve()
    async with engine.client() as client:
        await client.request(Pause())
        for name, num_prompt, priority in (("b", 16, 3), ("c", 48, -1), ("a", 32, 7), ("d", 20, 0)):
            await client.request(make_request(name, num_prompt, num_prompt + 3, priority=priority))
        await client.request(HoldRequests(select=RequestFilter(ids=["d"])))
        for field in sorted(set(RequestRow.__struct_fields__) - {"position", "wait_detail"}):
            for descending in (False, True):
                snapshot = await engine.snapshot(client, sort=field, descending=descending)
                assert snapshot.num_waiting_matched == 4
                found = [getattr(row, field) for row in snapshot.waiting]
                if field == "wait_reason":
                    assert snapshot.waiting[0 if descending else -1].request_id == "d"
                else:
                    assert found == sorted(found, key=lambda value: (value is not None, value), reverse=descending)


async def test_the_engines_identity_can_be_asked_for_again(serve):
    engine = serve()
    async with engine.client() as client:
        ack = await client.request(GetInfo())
        assert isinstance(ack, Ack)
        assert ack.data["info"]["boot_id"] == client.welcome.info.boot_id


def unread_bytes(engine):
    """What the server holds for each client beyond what the system has taken."""
    held = engine.server._connections
    return [c._transport.get_write_buffer_size() for c in held if c._transport is not None]


async def test_b15_slow_readers_cost_one_snapshot_each_and_get_the_newest_when_they_read_again(
    serve, brisk_runner, make_request, raw
):
    engine = serve(brisk_runner, num_kv_blocks=20_000)
    stalled = [
        raw(engine, Subscribe(interval_s=0.02, viewport=Viewport(running_rows=1000, waiting_rows=1000)))
        for _ in range(10)
    ]
    async with engine.client() as client:
        await submit_many(client, make_request, 1500)
        await steps_later(engine, client, 300)
        assert sum(unread_bytes(engine)) < 8 << 20
        now = await engine.snapshot(client)
    reader = stalled[0]
    seen = [update.snapshot.step for update in (reader.read_until(SnapshotUpdate) for _ in range(4))]
    while seen[-1] < now.step:
        seen.append(reader.read_until(SnapshotUpdate).snapshot.step)
    assert seen == sorted(seen)
    assert len(seen) < 100, "old snapshots were kept for it"


async def test_b15_replies_and_changes_are_not_dropped_for_a_slow_reader(serve, brisk_runner, make_request, raw):
    engine = serve(brisk_runner, num_kv_blocks=20_000)
    slow = raw(engine, Subscribe(interval_s=0.02, viewport=Viewport(waiting_rows=1000)))
    async with engine.client() as client:
        await submit_many(client, make_request, 1000)
        await steps_later(engine, client, 300)
        for value in (7, 6, 5):
            await client.request(SetKnobs(changes={"max_num_seqs": value}))
        slow.send(*(Envelope(id=100 + n, command=DumpSteps(count=1)) for n in range(50)))
        await steps_later(engine, client, 300)
    acks, values = [], []
    while len(acks) < 50 or len(values) < 3:
        match slow.read():
            case Ack() as ack if ack.id >= 100:
                acks.append(ack.id)
            case EventBatch() as batch:
                values += [e.changes["max_num_seqs"][1] for e in batch.events if e.changes]
            case None:
                raise AssertionError("cut")
    assert acks == list(range(100, 150))
    assert values == [7, 6, 5]


async def test_b15_a_reader_past_the_bound_is_cut_with_a_reason_and_nobody_else_notices(
    serve, make_request, collect, raw, monkeypatch
):
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 400_000)
    monkeypatch.setattr(connections, "PAUSE_BYTES", 1 << 40)
    engine = serve()
    hoarder = raw(engine)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 300))
        await collect(client, "r1")
        hoarder.send(*(Envelope(id=n, command=DumpSteps(count=300)) for n in range(1, 61)))
        goodbye = await asyncio.to_thread(hoarder.read_until, Goodbye)
        assert goodbye is None or "waiting to be read, the limit is 400000" in goodbye.reason
        while len(engine.server._connections) > 1:
            await engine.snapshot(client)
        await client.request(make_request("r2", 16, 3))
        await collect(client, "r2")


async def test_tokens_for_a_stalled_reader_are_joined_and_bounded(serve, brisk_runner, make_request, raw):
    engine = serve(brisk_runner, num_kv_blocks=20_000, max_model_len=100_000, max_num_seqs=64)
    owner = raw(engine, *(make_request(f"r{number}", 16, 2000) for number in range(64)))
    async with engine.client() as client:
        while (await engine.snapshot(client)).counters.generated_tokens < 64 * 1500:
            pass
    tokens: dict[str, int] = {}
    num_batches = 0
    while len(tokens) < 64 or min(tokens.values()) < 2000:
        batch = await asyncio.to_thread(owner.read_until, TokenBatch)
        num_batches += 1
        for output in batch.outputs:
            tokens[output.request_id] = tokens.get(output.request_id, 0) + len(output.token_ids)
    assert set(tokens.values()) == {2000}
    assert num_batches < 2000


async def test_b17_an_owner_that_leaves_too_many_tokens_unread_is_cut_and_its_requests_end(
    serve, brisk_runner, make_request, raw, monkeypatch
):
    monkeypatch.setattr(connections, "MAX_UNREAD_UNITS", 256)
    engine = serve(brisk_runner, num_kv_blocks=20_000, max_model_len=1_000_000, max_num_seqs=8)
    raw(engine, *(make_request(f"r{number}", 16, 100_000) for number in range(8)))
    async with engine.client() as client:
        async with asyncio.timeout(60):
            while (snapshot := await engine.snapshot(client)).counters.finished.get("abort") != 8:
                pass
        assert snapshot.num_running == 0


async def test_b17_either_side_can_end_while_the_other_does_not_read(serve, brisk_runner, make_request, raw):
    engine = serve(brisk_runner, num_kv_blocks=20_000)
    view = Viewport(waiting_rows=1000)
    leaves, stays, _never_reads = (raw(engine, Subscribe(interval_s=0.02, viewport=view)) for _ in range(3))
    async with engine.client() as client:
        await submit_many(client, make_request, 1000)
        await steps_later(engine, client, 300)
        leaves.socket.close()
        async with asyncio.timeout(30):
            while len(engine.server._connections) > 3:
                await engine.snapshot(client)
    async with asyncio.timeout(30):
        reading = asyncio.create_task(asyncio.to_thread(stays.read_until, Goodbye))
        await asyncio.to_thread(engine.server.stop)
    goodbye = await reading
    assert goodbye is not None
    assert goodbye.reason == "the engine is shutting down"


async def test_bytes_that_are_no_messages_end_only_that_connection(serve, raw):
    engine = serve()
    broken = raw(engine)
    broken.socket.sendall(b"\x00\x00\x00\x01\xc1")
    error = broken.read()
    assert isinstance(error, ErrorReply)
    assert error.code == "bad_frame"
    assert isinstance(broken.read(), Goodbye)
    assert broken.read() is None
    async with engine.client() as client:
        assert (await engine.snapshot(client)).num_running == 0


async def test_a_client_that_never_says_hello_is_let_go(serve, monkeypatch):
    monkeypatch.setattr(connections, "GREETING_S", 0.05)
    engine = serve()
    silent = RawClient(engine.path)
    error = await asyncio.to_thread(silent.read)
    assert "no Hello came" in error.message
    silent.socket.close()


async def test_there_is_a_limit_to_the_number_of_clients(serve, monkeypatch):
    monkeypatch.setattr(servers, "MAX_CONNECTIONS", 2)
    engine = serve()
    async with engine.client(), engine.client():
        with pytest.raises(CommandRefused, match="2 clients are connected, which is the limit"):
            async with engine.client():
                pass


async def test_another_users_process_is_refused(serve, monkeypatch):
    monkeypatch.setattr(connections, "peer_uid", lambda _: 4711)
    engine = serve()
    with pytest.raises(CommandRefused, match="uid 4711 may not control this engine"):
        async with engine.client():
            pass


async def test_a_command_the_engine_cannot_carry_out_is_refused_by_name(serve):
    engine = serve()
    engine.server._capabilities = ["GetSnapshot"]
    async with engine.client() as client:
        assert client.welcome.capabilities == ["GetSnapshot"]
        with pytest.raises(CommandRefused, match="can't carry out Pause; it can GetSnapshot"):
            await client.request(Pause())


async def test_watchers_make_no_call_in_the_engine_thread_while_steps_run(serve, brisk_runner, make_request):
    engine = serve(brisk_runner)
    wakes = []
    original = engine.loop.wake_watcher
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 3000))
        await client.request(Subscribe(interval_s=0.02))
        await steps_later(engine, client, 20)
        engine.loop.wake_watcher = lambda: (wakes.append(1), original())[1]
        await steps_later(engine, client, 300)
        assert wakes == []


async def test_every_message_carries_its_step_and_both_times(serve, make_request, raw):
    engine = serve()
    client = raw(engine, Subscribe(interval_s=0.02), make_request("r1", 16, 5), make_request("no prompt", 0))
    missing = {Ack, ErrorReply, SnapshotUpdate, EventBatch, TokenBatch}
    before = 0.0
    while missing:
        message = await asyncio.to_thread(client.read)
        assert message.mono >= before
        assert message.wall > 1e9
        if message.step >= 0 or isinstance(message, Ack | ErrorReply):  # these may leave before the first step
            missing.discard(type(message))
        before = message.mono
