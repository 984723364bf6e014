"""The client through a WebSocket: the same frames, a token, and one line when it goes wrong."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from schedtop.control.client import Client, Disconnected
from schedtop.control.framing import add_header
from schedtop.control.messages import Ack, Pause, SnapshotUpdate, Subscribe


class Relay:
    """The least a gateway does: checks the token, then carries frames between a WebSocket and the engine's socket."""

    def __init__(self, path):
        self._path = path
        self.tokens = []

    async def handle(self, request):
        self.tokens.append(request.headers.get("Authorization"))
        if self.tokens[-1] != "Bearer right":
            raise web.HTTPUnauthorized
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        reader, writer = await asyncio.open_unix_connection(str(self._path))
        down = asyncio.create_task(self._down(reader, websocket))
        async for message in websocket:
            writer.write(add_header(message.data))
        down.cancel()
        writer.close()
        await writer.wait_closed()
        return websocket

    @staticmethod
    async def _down(reader, websocket):
        while head := await reader.read(4):
            await websocket.send_bytes(await reader.readexactly(int.from_bytes(head, "big")))
        await websocket.close(code=aiohttp.WSCloseCode.GOING_AWAY, message=b"engine gone")


@pytest.fixture
async def gateway(serve):
    """URL of a relay to a running engine, and the relay and engine themselves."""
    engine = serve()
    relay = Relay(engine.path)
    application = web.Application()
    application.router.add_get("/control/v1/ws", relay.handle)
    async with TestServer(application) as server:
        yield str(server.make_url("")), relay, engine


async def test_commands_and_snapshots_go_through_a_websocket(gateway, monkeypatch, next_message):
    url, relay, _ = gateway
    monkeypatch.setenv("SCHEDTOP_TOKEN", "right")
    async with await Client.connect(url, name="remote") as client:
        assert client.welcome.info.name == "test"
        ack = await client.request(Pause(mode="keep"))
        assert isinstance(ack, Ack)
        await client.request(Subscribe(interval_s=0.02))
        update = await next_message(client, SnapshotUpdate)
        assert update.snapshot.pause == "all"
    assert relay.tokens == ["Bearer right"]


@pytest.mark.parametrize(
    ("token", "complaint"), [("", "it wants a token"), ("wrong", "the token given isn't accepted")]
)
async def test_a_missing_or_wrong_token_is_told_apart(gateway, monkeypatch, folder, token, complaint):
    url, _, _ = gateway
    monkeypatch.setenv("SCHEDTOP_TOKEN", token)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(Disconnected, match=rf"refused \(401\): {complaint}; set SCHEDTOP_TOKEN"):
        await Client.connect(url, name="remote")


async def test_a_web_server_that_is_no_gateway_is_recognised(monkeypatch):
    monkeypatch.setenv("SCHEDTOP_TOKEN", "right")
    async with TestServer(web.Application()) as server:
        with pytest.raises(Disconnected, match="answered 404 to /control/v1/ws: it isn't a schedtop gateway"):
            await Client.connect(str(server.make_url("")), name="remote")


async def test_nobody_at_the_address_is_one_line(monkeypatch):
    monkeypatch.setenv("SCHEDTOP_TOKEN", "right")
    with pytest.raises(Disconnected, match=r"no gateway answers at http://127.0.0.1:1"):
        await Client.connect("http://127.0.0.1:1", name="remote")


async def test_an_engine_that_leaves_is_told_through_the_gateway(gateway, monkeypatch):
    url, _, engine = gateway
    monkeypatch.setenv("SCHEDTOP_TOKEN", "right")
    async with await Client.connect(url, name="remote") as client:
        await asyncio.to_thread(engine.server.stop)
        last = [message async for message in client.messages()][-1]
        assert last.reason == "the engine is shutting down"


async def test_with_several_engines_and_no_token_the_files_and_the_way_out_are_listed(gateway, monkeypatch, tmp_path):
    url, _, _ = gateway
    monkeypatch.delenv("SCHEDTOP_TOKEN", raising=False)
    files = [tmp_path / "a.token", tmp_path / "b.token"]
    monkeypatch.setattr("schedtop.control.client_ws.find_token", lambda url: None)
    monkeypatch.setattr("schedtop.control.client_ws.token_files", lambda url: files)
    with pytest.raises(Disconnected, match="there are 2 of them here") as caught:
        await Client.connect(url, name="remote")
    for path in files:
        assert f"SCHEDTOP_TOKEN=$(cat {path})" in str(caught.value)
