"""A gateway on a free port, before a real engine and control server with a runner that needs no model."""

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from schedtop.control.audit import AuditLog
from schedtop.control.client import Client
from schedtop.control.http.app import Gateway, GatewayConfig, running
from schedtop.control.http.auth import Scope, TokenSpec
from schedtop.control.http.byte_tokenizer import ByteTokenizer
from schedtop.control.messages import EngineInfo
from schedtop.control.server import ControlServer
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.kv.connector.attach import attach_store, open_store
from schedtop.engine.loop import EngineLoop
from schedtop.engine.runner.fake import FakeRunner, NextToken
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput
from schedtop.engine.snapshot import Snapshot

SCOPES = {
    "operator": [Scope.INFER, Scope.READ, Scope.CONTROL],
    "reader": [Scope.READ],
    "batch": [Scope.INFER],
    "steward": [Scope.CONTROL],
}
TOKENS = {name: f"{name}-token-0123456789" for name in SCOPES}
PRIORITIES = {"batch": {"priority_min": 0, "priority_max": 9}, "steward": {"priority_min": 5}}
SPECS = tuple(
    TokenSpec(name=name, token=TOKENS[name], scopes=scopes, **PRIORITIES.get(name, {}))
    for name, scopes in SCOPES.items()
)


SLOW_STEP_S = 0.1


def letters(token_ids: list[int]) -> int:
    """abcabc...: the next letter follows from the length of the context."""
    return ord("a") + len(token_ids) % 26


def says(text: str, num_prompt: int) -> NextToken:
    """A model that answers a prompt of so many tokens with `text`, then zero bytes, one byte per token."""
    answer = text.encode()

    def next_token(token_ids: list[int]) -> int:
        place = len(token_ids) - num_prompt
        return answer[place] if place < len(answer) else 0

    return next_token


class PacedRunner(FakeRunner):
    """Each step takes a moment, as with a model, so that requests live long enough to be watched."""

    def __init__(self, block_size: int, next_token: NextToken, step_s: float) -> None:
        super().__init__(block_size, next_token)
        self.step_s = step_s

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(self.step_s)
        return super().execute_model(scheduler_output)


class Served:
    """Engine loop and control server on a socket."""

    def __init__(self, folder: Path, core: EngineCore, runner: FakeRunner, boot_id: str = "boot-1") -> None:
        self.core = core
        self.runner = runner
        self.path = folder / "engine.sock"
        self.loop = EngineLoop(core)
        self.audit = AuditLog(folder / "audit.sqlite")
        config = core.config
        info = EngineInfo(
            name=config.name, model=config.model, boot_id=boot_id, pid=1, version="0", block_size=config.block_size,
            num_usable_blocks=config.num_usable_blocks, max_model_len=config.max_model_len, started_wall=1e9,
            max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs,
            adapters=list(config.adapters),
        )  # fmt: skip
        self.server = ControlServer(self.loop, info, core.knob_table, self.audit)

    def start(self) -> None:
        self.loop.start()
        self.server.start(self.path)

    def stop(self) -> None:
        self.server.stop()
        self.loop.stop()
        self.core.shutdown()
        self.audit.close()


class World:
    """An engine, its gateway, a client session and a connection to the control socket."""

    def __init__(self, served: Served, gateway: Gateway, session: aiohttp.ClientSession, client: Client) -> None:
        self.served = served
        self.core = served.core
        self.runner = served.runner
        self.gateway = gateway
        self.session = session
        self.client = client

    def post(self, path: str, body: Any = None, token: str | None = None, **options: Any) -> Any:
        """POST JSON."""
        return self.session.post(path, json=body, headers=bearer(token), **options)

    async def send(self, method: str, path: str, body: Any = None, token: str | None = "operator") -> tuple[int, Any]:
        """Any request with a token: (status, JSON)."""
        options = {} if body is None else {"json": body}
        async with self.session.request(method, path, headers=bearer(token), **options) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any = "hello", token: str | None = None, **fields: Any) -> tuple[int, Any]:
        """One completion: (status, JSON)."""
        async with self.post("/v1/completions", {"prompt": prompt, **fields}, token) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        """One chat completion: (status, JSON)."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        async with self.post("/v1/chat/completions", body) as response:
            return response.status, await response.json()

    async def snapshot(self) -> Snapshot:
        """The engine at this moment, straight from its socket."""
        from schedtop.control.messages import GetSnapshot

        reply: Any = await self.client.request(GetSnapshot())
        snapshot: Snapshot = reply.update.snapshot
        return snapshot

    @contextlib.contextmanager
    def slow_motion(self) -> Iterator[None]:
        """While a test arranges what must be true at once: requests don't end before the last of them has begun."""
        usual, self.runner.step_s = self.runner.step_s, SLOW_STEP_S
        yield
        self.runner.step_s = usual

    async def until(self, holds: Callable[[Snapshot], bool]) -> Snapshot:
        """Ask until the engine is as expected; the test's time limit ends a wait for nothing."""
        while not holds(snapshot := await self.snapshot()):
            pass
        return snapshot

    async def metrics(self) -> dict[str, float]:
        """The page as `name{labels}` -> value."""
        async with self.session.get("/metrics") as response:
            page = await response.text()
        lines = (line for line in page.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {TOKENS.get(token, token)}"}


StartWorld = Callable[..., Any]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="st-") as name:
        yield Path(name)


@pytest.fixture
async def start_world(folder: Path) -> AsyncIterator[StartWorld]:
    """Starts engine and gateway; keywords: those of `start`, and fields of EngineConfig."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            next_token: NextToken = letters, knobs: dict[str, Any] | None = None, gateway: dict[str, Any] | None = None,
            load_tokenizer: Any = lambda info: ByteTokenizer(), step_s: float = 0.0, eos: Any = (),
            runner: Any = None, kv_store: str = "",
            grammars: Any = None, **config: Any,
        ) -> World:  # fmt: skip
            settings = EngineConfig(**{"max_model_len": 256, **config})
            runner = runner or PacedRunner(settings.block_size, next_token, step_s)
            core = EngineCore(
                settings, runner, initial_knobs(settings, **(knobs or {})), eos_token_ids=eos, grammar_backend=grammars
            )
            if kv_store:
                attach_store(core, runner, open_store(kv_store, runner.memory.format("fake", "")))
            served = Served(folder, core, runner)
            served.start()
            stack.callback(served.stop)
            options = {"tokens": SPECS, "is_open": True, "port": 0, **(gateway or {})}
            gate = Gateway(GatewayConfig(target=str(served.path), **options), load_tokenizer)
            await stack.enter_async_context(running(gate))
            await gate.link.was_seen.wait()
            session = await stack.enter_async_context(aiohttp.ClientSession(gate.url))
            client = await stack.enter_async_context(await Client.connect(str(served.path), name="test"))
            return World(served, gate, session, client)

        yield start


@pytest.fixture
async def world(start_world: StartWorld) -> World:
    """The usual one."""
    started: World = await start_world()
    return started
