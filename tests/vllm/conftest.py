"""A real `vllm serve` with the plugin, on a tiny random model. Needs the environment that `make test-vllm` builds.

SCHEDTOP_VLLM names its folder; `make test` leaves these tests out. All that run on `served` run twice: with vLLM's sync
and with its async scheduling.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from vllm_server import ASYNC, SYNC, Served, serving

from schedtop.control.client import Client
from schedtop.control.messages import (
    AbortRequests,
    GetSnapshot,
    ReleaseRequests,
    RequestFilter,
    Resume,
    SetKnobs,
    SnapshotReply,
)
from schedtop.engine.snapshot import Snapshot, Viewport

PORT = 8473
ALL = Viewport(running_rows=100, waiting_rows=200)
EVERYTHING = RequestFilter(id_prefix="cmpl-")
PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def vllm_folder() -> Path:
    folder = os.environ.get("SCHEDTOP_VLLM")
    assert folder, "run these tests with `make test-vllm`: SCHEDTOP_VLLM names the environment it builds"
    return Path(folder).resolve()


@pytest.fixture(scope="session", params=[SYNC, ASYNC], ids=["sync", "async"])
def served(
    request: pytest.FixtureRequest, vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(vllm_folder, tmp_path_factory.mktemp("r"), PORT, request.param) as server:
        yield server


class Load:
    """Completions under way against vLLM's own HTTP server."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self._url = f"{served.url}/v1/completions"
        self._session = session
        self.tasks: list[asyncio.Task[dict[str, Any]]] = []

    def add(self, prompt: str, max_tokens: int, priority: int = 0) -> asyncio.Task[dict[str, Any]]:
        body = {**self._body(prompt, max_tokens), "priority": priority}
        task = asyncio.create_task(self._post(body))
        self.tasks.append(task)
        return task

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}

    def keep_on(self, prompt: str, max_tokens: int) -> None:
        """The same request again and again until the test is over."""

        async def again() -> dict[str, Any]:
            while True:
                await self._post(self._body(prompt, max_tokens))

        self.tasks.append(asyncio.create_task(again()))

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._url, json=body) as response:
            answer: dict[str, Any] = await response.json()
            return answer


class Operator:
    """What tests do again and again with a client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.request = client.request

    async def look(self) -> Snapshot:
        reply = await self.client.request(GetSnapshot(viewport=ALL))
        assert isinstance(reply, SnapshotReply)
        return reply.update.snapshot

    async def settle(self, is_so: Callable[[Snapshot], bool]) -> Snapshot:
        """Look again and again until something is so; what must not be missed has to last (pause, or many tokens)."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not is_so(snapshot := await self.look()):
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"it never was so; at last: {snapshot}")
            await asyncio.sleep(0.01)
        return snapshot

    async def clear_holds(self) -> None:
        """Let everything be scheduled."""
        await self.request(Resume())
        await self.request(ReleaseRequests(select=EVERYTHING))

    async def clear(self) -> None:
        """Put everything back as it was at the start."""
        await self.request(Resume())
        await self.request(ReleaseRequests(select=EVERYTHING))
        await self.request(AbortRequests(select=EVERYTHING))
        changes = {"max_num_batched_tokens": 512, "max_num_seqs": 32, "policy": "fcfs", "watermark": 0.0,
                   "long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False,
                   "reserve_full_prompt": True}  # fmt: skip
        await self.request(SetKnobs(changes=changes))
        await self.settle(lambda snapshot: snapshot.num_running + snapshot.num_waiting == 0)


@pytest.fixture
async def operator(served: Served) -> AsyncIterator[Operator]:
    async with await Client.connect(served.socket, name="test") as client:
        operator = Operator(client)
        await operator.clear()
        yield operator
        await operator.clear()


@pytest.fixture
async def load(served: Served) -> AsyncIterator[Load]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        load = Load(served, session)
        yield load
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)
