"""A real engine with a runner that needs no model, behind a real socket."""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from schedtop.control.audit import AuditLog
from schedtop.control.client import Client, Message
from schedtop.control.messages import AddRequest, EngineInfo, SnapshotUpdate, TokenBatch
from schedtop.control.server import ControlServer
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.loop import EngineLoop
from schedtop.engine.runner.base import ModelRunner
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput
from schedtop.engine.sim.step_model import StepModel
from schedtop.engine.snapshot import FinishReason, Snapshot


class GatedRunner(FakeRunner):
    """A fake runner whose steps wait for `allow`, so that a test decides when the engine moves."""

    def __init__(self, block_size: int = 16) -> None:
        super().__init__(block_size)
        self._gate = threading.Semaphore(0)
        self._is_open = False
        self.entered = threading.Semaphore(0)
        """Released each time a step has begun."""

    def allow(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._gate.release()

    def open(self) -> None:
        self._is_open = True
        self._gate.release()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.entered.release()
        if not self._is_open:
            self._gate.acquire()
        return super().execute_model(scheduler_output)


class ServedEngine:
    """An engine loop and its control server on a socket of their own."""

    def __init__(self, folder: Path, runner: ModelRunner | None, knobs: dict[str, Any], **config: Any) -> None:
        self.config = EngineConfig(**{"num_kv_blocks": 101, "max_num_batched_tokens": 256, "max_num_seqs": 8, **config})
        self.runner = runner or FakeRunner(self.config.block_size)
        self.core = EngineCore(self.config, self.runner, initial_knobs(self.config, **knobs))
        self.path = folder / "engine.sock"
        self.audit = AuditLog(folder / "audit.sqlite")
        self.loop = EngineLoop(self.core)
        info = EngineInfo(
            name="test",
            model="fake",
            boot_id="boot-1",
            pid=1,
            version="0",
            block_size=self.config.block_size,
            num_usable_blocks=self.config.num_usable_blocks,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
        )
        self.server = ControlServer(self.loop, info, self.core.knob_table, self.audit)

    def start(self) -> "ServedEngine":
        self.loop.start()
        self.server.start(self.path)
        return self

    def stop(self) -> None:
        if isinstance(self.runner, GatedRunner):
            self.runner.open()
        self.server.stop()
        self.loop.stop()
        self.core.shutdown()
        self.audit.close()

    def client(self, name: str = "test", **options: Any) -> contextlib.AbstractAsyncContextManager[Client]:
        return _connected(str(self.path), name, options)

    async def snapshot(self, client: Client, **viewport: Any) -> Snapshot:
        return (await self.update(client, **viewport)).snapshot

    async def update(self, client: Client, **viewport: Any) -> SnapshotUpdate:
        from schedtop.control.messages import GetSnapshot, SnapshotReply
        from schedtop.engine.snapshot import Viewport

        reply = await client.request(GetSnapshot(viewport=Viewport(**viewport)))
        assert isinstance(reply, SnapshotReply)
        return reply.update


@contextlib.asynccontextmanager
async def _connected(path: str, name: str, options: dict[str, Any]) -> AsyncIterator[Client]:
    client = await Client.connect(path, name=name, **options)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="st-") as name:
        yield Path(name)


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., ServedEngine]]:
    """Start engines; they end with the test."""
    running: list[ServedEngine] = []

    def start(runner: ModelRunner | None = None, knobs: dict[str, Any] | None = None, **config: Any) -> ServedEngine:
        own = folder / str(len(running))
        own.mkdir(mode=0o700)
        running.append(ServedEngine(own, runner, knobs or {}, **config).start())
        return running[-1]

    yield start
    for engine in running:
        engine.stop()


@pytest.fixture
def gated_runner() -> GatedRunner:
    """A runner whose steps the test lets go one by one."""
    return GatedRunner()


@pytest.fixture
def brisk_runner() -> SimulatedRunner:
    """A runner whose steps take half a millisecond however long the contexts are: requests outlast what a test does."""
    model = StepModel(base_s=0.0005, per_sequence_s=0.0, per_prefill_token_s=0.0)
    return SimulatedRunner(model, time.sleep)


@pytest.fixture
def make_request() -> Callable[..., AddRequest]:
    """`make_request("r1", 32, 8)`: prompt of 32 tokens, 8 to generate, no end token."""

    def make(request_id: str, num_prompt: int = 16, max_tokens: int = 4, **fields: Any) -> AddRequest:
        seed = sum(map(ord, request_id))
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=[(seed * 31 + index * 7) % 997 for index in range(num_prompt)],
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            **fields,
        )

    return make


class Collected:
    """Tokens and ends of requests, gathered from a client's messages."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.details: dict[str, str] = {}

    def take(self, batch: TokenBatch) -> None:
        for output in batch.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
                self.details[output.request_id] = output.detail


@pytest.fixture
def collect() -> Callable[..., Any]:
    """Wait until the given requests of a client have ended."""

    async def until_ended(client: Client, *request_ids: str, into: Collected | None = None) -> Collected:
        collected = into or Collected()
        async for message in client.messages():
            if isinstance(message, TokenBatch):
                collected.take(message)
            if collected.ends.keys() >= set(request_ids):
                return collected
        raise AssertionError(f"the connection ended before {request_ids} did")

    return until_ended


@pytest.fixture
def next_message() -> Callable[..., Any]:
    """The next message of a kind from a client."""

    async def wait_for(client: Client, kind: type[Message], where: Callable[[Any], bool] = lambda _: True) -> Any:
        async with asyncio.timeout(30):
            async for message in client.messages():
                if isinstance(message, kind) and where(message):
                    return message
        raise AssertionError(f"the connection ended before a {kind.__name__} came")

    return wait_for
