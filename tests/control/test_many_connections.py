"""A thousand clients at once, and what happens where the system allows fewer open files."""

import asyncio
import resource
import socket

import pytest

from schedtop.control import open_files, watchers
from schedtop.control import server as servers
from schedtop.control.errors import CommandRefused, SocketRefused
from schedtop.control.framing import MAX_PUBLISHED_BYTES, FrameReader, decode_from_server, encode_frame
from schedtop.control.messages import Ack, Envelope, GetInfo, Goodbye, Hello, SetKnobs, SnapshotUpdate, Subscribe
from schedtop.control.open_files import RESERVED, connection_limit
from schedtop.engine.snapshot import Viewport

NUM_CLIENTS = 1000
GIVE_UP_S = 120
"""A hang is told after this long."""


@pytest.fixture
def many_files():
    """Both ends of a thousand connections are in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def open_many():
    """Connect and greet: `open_many(path, count)`."""
    opened = []

    def connect(path, count):
        fresh = []
        for _ in range(count):
            one = socket.socket(socket.AF_UNIX)
            one.settimeout(GIVE_UP_S)
            one.connect(str(path))
            one.sendall(encode_frame(Hello(client="one of many")))
            fresh.append(one)
        opened.extend(fresh)
        return fresh

    yield connect
    for one in opened:
        one.close()


def read_until(one, kind):
    reader = FrameReader(MAX_PUBLISHED_BYTES)
    while data := one.recv(1 << 16):
        reader.feed(data)
        for frame in reader.frames():
            message = decode_from_server(frame)
            if isinstance(message, kind):
                return message
    return None


async def test_a_thousand_clients_are_held_answered_and_told_goodbye(
    serve, brisk_runner, make_request, many_files, open_many
):
    engine = serve(brisk_runner, num_kv_blocks=20_000, max_model_len=100_000)
    async with asyncio.timeout(GIVE_UP_S), engine.client() as client:
        await client.request(make_request("r1", 16, 100_000))
        clients = await asyncio.to_thread(open_many, engine.path, NUM_CLIENTS)
        for one in clients:
            one.sendall(encode_frame(Envelope(id=1, command=GetInfo())))
        answers = await asyncio.to_thread(lambda: [read_until(one, Ack) for one in clients])
        assert len([answer for answer in answers if answer is not None and answer.id == 1]) == NUM_CLIENTS
        assert len(engine.server._connections) == NUM_CLIENTS + 1
        before = (await engine.snapshot(client)).step
        ack = await client.request(SetKnobs(changes={"max_num_seqs": 4}))
        assert ack.after == {"max_num_seqs": 4}
        while (await engine.snapshot(client)).step < before + 50:
            pass
        stopping = asyncio.create_task(asyncio.to_thread(engine.server.stop))
        farewells = await asyncio.to_thread(lambda: [read_until(one, Goodbye) for one in clients])
        await stopping
    assert {farewell.reason for farewell in farewells} == {"the engine is shutting down"}


async def test_a_thousand_subscribers_with_one_view_cost_one_snapshot_and_one_encoding_a_round(
    serve, gated_runner, make_request, many_files, open_many, monkeypatch
):
    engine = serve(gated_runner)
    snapshots, encoded = [], []
    encode = watchers.stamped_frame
    monkeypatch.setattr(
        watchers, "stamped_frame", lambda message, step: (encoded.append(type(message)), encode(message, step))[1]
    )
    build, engine.core.snapshot = engine.core.snapshot, lambda view: (snapshots.append(view), build(view))[1]
    view = Viewport(running_rows=7)
    async with asyncio.timeout(GIVE_UP_S), engine.client() as client:
        clients = await asyncio.to_thread(open_many, engine.path, NUM_CLIENTS)
        await client.request(make_request("r1", 16, 100))
        await asyncio.to_thread(gated_runner.entered.acquire)  # no boundary until all have asked
        for one in clients:
            one.sendall(encode_frame(Envelope(id=1, command=Subscribe(interval_s=3600.0, viewport=view))))
        await asyncio.to_thread(lambda: [read_until(one, Ack) for one in clients])
        num_asked_apart = len(engine.loop._inbox)
        gated_runner.open()
        updates = await asyncio.to_thread(lambda: [read_until(one, SnapshotUpdate) for one in clients])
    assert None not in updates
    assert snapshots.count(view) <= num_asked_apart + 1
    assert num_asked_apart < NUM_CLIENTS
    assert encoded.count(SnapshotUpdate) <= snapshots.count(view)


async def test_the_client_too_many_is_told_so_and_the_others_stay(serve, monkeypatch):
    monkeypatch.setattr(servers, "connection_limit", lambda wanted: open_files.ConnectionLimit(1, "1 is the limit"))
    engine = serve()
    async with engine.client() as first:
        with pytest.raises(CommandRefused, match="1 is the limit; close one and try again"):
            async with engine.client():
                pass
        assert isinstance(await first.request(GetInfo()), Ack)


@pytest.fixture
def limits(monkeypatch):
    """Pretend limits on open files: `limits(soft, hard)`; what is set is collected."""
    chosen = []

    def pretend(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: chosen.append(pair))
        return chosen

    return pretend


def test_the_soft_limit_is_raised_as_far_as_needed(limits):
    chosen = limits(1024, 1 << 20)
    assert connection_limit(1024).room == 1024
    assert chosen == [(1024 + RESERVED, 1 << 20)]


def test_enough_open_files_are_left_as_they_are(limits):
    chosen = limits(65_536, 65_536)
    assert connection_limit(1024).room == 1024
    assert limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY) == []
    assert connection_limit(1024).room == 1024
    assert chosen == []


def test_a_low_hard_limit_means_fewer_clients_and_a_refusal_that_says_why(limits):
    limits(1024, 1024)
    limit = connection_limit(1024)
    assert limit.room == 1024 - RESERVED
    assert "768 clients are connected, which is the limit of a process that may open 1024 files" in limit.text
    assert "LimitNOFILE" in limit.text


def test_without_room_for_anybody_the_server_refuses_to_start(limits):
    limits(100, 100)
    with pytest.raises(SocketRefused, match="may open 100 files, it needs 257 at least"):
        connection_limit(1024)
