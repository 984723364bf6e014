"""A gateway on a free port, before an engine with a fake runner."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from schedtop.control.framing import MAX_REQUEST_BYTES, FrameReader, decode_from_client, encode_frame
from schedtop.control.http.app import Gateway, GatewayConfig, running
from schedtop.control.http.auth import Scope, TokenSpec
from schedtop.control.http.byte_tokenizer import ByteTokenizer
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AddRequest,
    EngineInfo,
    Envelope,
    ErrorReply,
    FromServer,
    GetSnapshot,
    Hello,
    KnobsAck,
    Pause,
    Resume,
    SetKnobs,
    SnapshotReply,
    SnapshotUpdate,
    Subscribe,
    TokenBatch,
    TokenOutput,
    Welcome,
)
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.loop import Call, EngineLoop
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.runner.fake import FakeRunner, NextToken
from schedtop.engine.snapshot import Viewport

OPERATOR = "operator-token-0123456789"
READER = "reader-token-0123456789"
URGENT = "urgent-token-0123456789"
TOKENS = (
    TokenSpec(name="operator", token=OPERATOR, scopes=[Scope.INFER, Scope.READ, Scope.CONTROL]),
    TokenSpec(name="reader", token=READER, scopes=[Scope.READ]),
    TokenSpec(name="batch", token=URGENT, scopes=[Scope.INFER], priority_min=0, priority_max=10),
)


def letters(token_ids: list[int]) -> int:
    """abcabc...: the next letter follows from the length of the context."""
    return ord("a") + len(token_ids) % 26


class MiniServer:
    """Serves one engine; one client at a time gets its tokens."""

    def __init__(self, core: EngineCore, path: Path) -> None:
        self.core = core
        self.path = path
        self.loop = EngineLoop(core)
        self._writers: set[asyncio.StreamWriter] = set()
        self._owner: dict[str, asyncio.StreamWriter] = {}
        self._steps: list[Any] = []
        self._subscribed: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self.loop.start()
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        self._poller = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        self._poller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._poller
        self._server.close()
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()
        self.loop.stop()
        self.core.shutdown()

    async def _poll(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(0.001)
            while self.loop.outbox:
                item = self.loop.outbox.popleft()
                if isinstance(item, EngineCoreOutputs):
                    self._hand_out(item)
                else:
                    item.tag(item)
            tick += 1
            if tick % 50 == 0:
                for writer in self._subscribed:
                    self._call(lambda core: core.snapshot(Viewport()), lambda call, w=writer: self._publish(w, call))

    def _publish(self, writer: asyncio.StreamWriter, call: Call) -> None:
        steps, self._steps = self._steps, []
        self._send(writer, SnapshotUpdate(snapshot=call.result, steps=steps))

    def _hand_out(self, item: EngineCoreOutputs) -> None:
        if item.record is not None:
            self._steps.append(item.record)
        for output in item.outputs:
            if (writer := self._owner.get(output.request_id)) is not None:
                token_output = TokenOutput(
                    output.request_id, output.new_token_ids, output.finish_reason, output.detail, output.logprobs,
                    output.num_cached_tokens,
                )  # fmt: skip
                self._send(writer, TokenBatch(step=item.step, outputs=[token_output]))

    def _call(self, operation: Any, done: Any) -> None:
        self.loop.submit(operation, done)

    def _send(self, writer: asyncio.StreamWriter, message: FromServer) -> None:
        if not writer.is_closing():
            writer.write(encode_frame(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._read(reader, writer)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader(MAX_REQUEST_BYTES)
        while data := await reader.read(1 << 16):
            frames.feed(data)
            for body in frames.frames():
                self._take(decode_from_client(body), writer)
        self._writers.discard(writer)
        self._subscribed.discard(writer)
        ids = [request_id for request_id, owner in self._owner.items() if owner is writer]
        self._call(lambda core: core.abort(ids), lambda call: None)

    def _take(self, message: Hello | Envelope, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Hello):
            config = self.core.config
            info = EngineInfo(
                name=config.name, model=config.model, boot_id="b", pid=1, version="0", block_size=config.block_size,
                num_usable_blocks=config.num_usable_blocks, max_model_len=config.max_model_len, started_wall=1e9,
            )  # fmt: skip
            self._send(writer, Welcome(protocol=1, info=info, knobs=list(self.core.knob_table), capabilities=[]))
            return
        number, command = message.id, message.command
        match command:
            case AddRequest() as c:
                self._owner[c.request_id] = writer

                def operation(core: EngineCore) -> Any:
                    return core.add_request(c.request_id, c.prompt_token_ids, c.sampling, c.priority)
            case AbortRequests() as c:

                def operation(core: EngineCore) -> Any:
                    return core.abort(c.select.ids)
            case SetKnobs() as c:

                def operation(core: EngineCore) -> Any:
                    return core.set_knobs(c.changes, c.expect_generation, c.dry_run)
            case GetSnapshot() as c:

                def operation(core: EngineCore) -> Any:
                    return core.snapshot(c.viewport)
            case Pause() as c:

                def operation(core: EngineCore) -> Any:
                    return core.pause(c.mode)
            case Resume():

                def operation(core: EngineCore) -> Any:
                    return core.resume()
            case Subscribe():
                self._subscribed.add(writer)

                def operation(core: EngineCore) -> Any:
                    return None
            case _:
                raise AssertionError(command)

        def done(call: Call) -> None:
            self._send(writer, self._reply(number, call))

        self._call(operation, done)

    def _reply(self, number: int, call: Call) -> FromServer:
        if isinstance(call.error, SchedtopError):
            return ErrorReply(id=number, code=call.error.code, message=str(call.error))
        assert call.step is not None
        match call.result:
            case result if type(result).__name__ == "Snapshot":
                return SnapshotReply(id=number, update=SnapshotUpdate(snapshot=result))
            case result if type(result).__name__ == "KnobChange":
                return KnobsAck(id=number, applied_at_step=call.step, change_id=1, generation=result.generation,
                                before=result.before, after=result.after)  # fmt: skip
            case _:
                return Ack(id=number, applied_at_step=call.step)


class World:
    """An engine, its gateway and a client session."""

    def __init__(self, server: MiniServer, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.core = server.core
        self.gateway = gateway
        self.session = session

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """POST JSON."""
        return self.session.post(path, json=body, **options)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> tuple[int, Any]:
        """One completion: (status, JSON)."""
        async with self.post("/v1/completions", {"prompt": prompt, **fields}) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        """One chat completion: (status, JSON)."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        async with self.post("/v1/chat/completions", body) as response:
            return response.status, await response.json()


StartWorld = Callable[..., Any]


@pytest.fixture
async def start_world(tmp_path: Path) -> AsyncIterator[StartWorld]:
    """Starts engine and gateway; keywords: `next_token`, `knobs`, `gateway` (dict), and fields of EngineConfig."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            next_token: NextToken = letters, knobs: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None,
            load_tokenizer: Any = lambda info: ByteTokenizer(), runner: Any = None, eos: Any = (), **config: Any,
        ) -> World:  # fmt: skip
            settings = EngineConfig(**{"max_model_len": 256, **config})
            core = EngineCore(
                settings, runner or FakeRunner(settings.block_size, next_token),
                initial_knobs(settings, **(knobs or {})), eos_token_ids=eos,
            )  # fmt: skip
            server = MiniServer(core, tmp_path / "engine.sock")
            await server.start()
            stack.push_async_callback(server.stop)
            options = {"tokens": TOKENS, "is_open": True, "port": 0, **(gateway or {})}
            gate = Gateway(GatewayConfig(target=str(server.path), **options), load_tokenizer)
            await stack.enter_async_context(running(gate))
            await gate.link.was_seen.wait()
            session = await stack.enter_async_context(aiohttp.ClientSession(gate.url))
            return World(server, gate, session)

        yield start


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    """The usual one."""
    started: World = await start_world()
    return started


def sse_data(text: str) -> Iterator[str]:
    """The `data:` of each event in a response body."""
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
