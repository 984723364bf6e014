"""`schedtop serve` and its gateway end under load: readiness first, whole answers next, the rest is told, exit 0."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Iterator

import aiohttp
import pytest
from processes import Home, Served

from schedtop.control.client import Client
from schedtop.control.messages import SnapshotUpdate, Subscribe

pytestmark = pytest.mark.e2e


@pytest.fixture
def served(home: Home, request: pytest.FixtureRequest) -> Iterator[Served]:
    """An engine that lets running requests go on for the parameter's seconds."""
    sizes = ("--num-kv-blocks", "4001", "--max-model-len", "60000", "--max-num-seqs", "64")
    engine = Served(home, "--runner", "simulated", "--drain", str(request.param), *sizes)
    yield engine
    engine.stop()


async def stream(session: aiohttp.ClientSession, num_tokens: int) -> dict:
    """The last choice of a stream."""
    body = {"prompt": "x" * 16, "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return json.loads(events[-3][6:])["choices"][0]


async def readiness(session: aiohttp.ClientSession, expected: int) -> None:
    """Ask until the gateway answers so; each answer comes after a look at the engine."""
    while True:
        async with session.get("/ready") as response:
            if response.status == expected:
                return
        await asyncio.sleep(0.01)


def _client(served: Served) -> Awaitable[Client]:
    return Client.connect(str(served.socket), name="test")


async def _end(served: Served, num_short: int, signals: int) -> None:
    async with aiohttp.ClientSession(served.url) as session, await _client(served) as client:
        await readiness(session, 200)
        await client.request(Subscribe(interval_s=0.05))
        long = asyncio.create_task(stream(session, 50_000))
        short = [asyncio.create_task(stream(session, 40)) for _ in range(num_short)]
        async for message in client.messages():
            if isinstance(message, SnapshotUpdate) and message.snapshot.counters.added == num_short + 1:
                break
        served.process.send_signal(signal.SIGTERM)
        await readiness(session, 503)
        async with session.post("/v1/completions", json={"prompt": "late"}) as late:
            assert late.status == 503
        assert {end["finish_reason"] for end in await asyncio.gather(*short)} == {"length"}
        for _ in range(signals - 1):
            served.process.send_signal(signal.SIGTERM)
        last = await long
        assert last["finish_reason"] == "abort" and "shutting down" in last["stop_reason"]
    assert await asyncio.to_thread(served.process.wait, 60) == 0
    assert not served.socket.exists()


@pytest.mark.parametrize("served", [3], indirect=True)
def test_four_of_five_streams_end_whole_and_the_fifth_is_told_at_the_limit(served: Served) -> None:
    asyncio.run(_end(served, num_short=4, signals=1))


@pytest.mark.parametrize("served", [6000], indirect=True)
def test_of_fifty_streams_all_that_can_end_whole_and_a_second_signal_ends_the_last(served: Served) -> None:
    asyncio.run(_end(served, num_short=49, signals=2))
