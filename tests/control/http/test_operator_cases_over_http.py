"""Faults that operators of inference servers reported, sent over HTTP: what must happen instead is in the names."""

import asyncio
import json
import re
import socket
import sys
from pathlib import Path

import pytest

from schedtop.engine.runner.fake import FakeRunner

STEP_S = 0.003
MAX_GROWTH_KIB = 24 << 10
"""What one client that reads nothing may cost the gateway: 65,536 tokens and log-probabilities, and buffers."""


def letters(token_ids: list[int]) -> int:
    return ord("a") + len(token_ids) % 26


# ---- a client that is gone -------------------------------------------------------------------------------------


async def test_a_client_that_leaves_while_drafts_are_verified_frees_its_blocks_for_the_next(start_world) -> None:
    runner = FakeRunner(16, letters, proposer=lambda tokens: [letters(tokens), 0])
    world = await start_world(
        runner=runner, max_num_seqs=1, max_model_len=4096, max_num_speculative_tokens=2,
        knobs={"num_speculative_tokens": 2},
    )  # fmt: skip
    free = (await world.snapshot()).pool.free
    response = await world.post("/v1/completions", {"prompt": "x" * 16, "stream": True, "max_tokens": 4000})
    for _ in range(3):
        await response.content.readuntil(b"\n\n")
    waiting = asyncio.create_task(world.complete("hello", max_tokens=2))
    await world.until(lambda s: s.num_waiting == 1)
    response.close()
    assert (await waiting)[0] == 200
    snapshot = await world.until(lambda s: s.num_running + s.num_waiting == 0)
    assert snapshot.pool.free == free
    assert snapshot.counters.finished == {"abort": 1, "length": 1}
    assert snapshot.counters.accepted_tokens > 0


# ---- everything cached -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(32, 16), (33, 32), (16, 0)])
async def test_a_prompt_that_is_cached_whole_computes_at_least_one_token_and_says_the_same(
    world, num_prompt, num_cached
) -> None:
    answers = [await world.complete("x" * num_prompt, max_tokens=1) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200]
    texts = [body["choices"][0]["text"] for _, body in answers]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for _, body in answers]
    assert texts[0] == texts[1]
    assert cached == [0, num_cached]
    assert (await world.snapshot()).counters.computed_tokens == 2 * num_prompt - num_cached


async def test_a_connector_that_has_the_whole_prompt_leaves_a_token_to_compute(start_world, tmp_path) -> None:
    store = f"folder:{tmp_path}"
    first = await start_world(kv_store=store)
    _, computed = await first.complete("x" * 33, max_tokens=1)
    _, shorter = await first.complete("x" * 32, max_tokens=1)
    first.served.stop()
    second = await start_world(kv_store=store)
    for num_prompt, num_cached, whole in ((32, 16, shorter), (33, 32, computed)):
        status, body = await second.complete("x" * num_prompt, max_tokens=1)
        assert (status, body["choices"][0]["text"]) == (200, whole["choices"][0]["text"])
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
    counters = (await second.snapshot()).counters
    assert (counters.external_cache_hits, counters.external_cache_queries) == (16, 32 + 1)
    assert counters.prompt_tokens >= counters.prefix_cache_hits >= counters.external_cache_hits >= 0
    assert (await second.send("GET", "/control/v1/self-check"))[1]["data"]["faults"] == []


# ---- a queue with an end ---------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_with_retry_after_lowering_drops_nobody_and_zero_means_no_end(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_num_seqs=1, knobs={"max_num_queued_reqs": 3})

    async def ask(count: int) -> list[asyncio.Task]:
        before = (await world.snapshot()).counters
        tasks = [asyncio.create_task(world.complete("x", max_tokens=30)) for _ in range(count)]
        await world.until(lambda s: s.counters.added + s.counters.refused == before.added + before.refused + count)
        return tasks

    with world.slow_motion():
        first = await ask(1)
        await world.until(lambda s: s.num_running == 1)
        await world.send("POST", "/control/v1/pause", {"mode": "keep"})
    tasks = first + await ask(9)
    assert (await world.snapshot()).num_waiting == 3
    async with world.post("/v1/completions", {"prompt": "x", "n": 3}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["Retry-After"]) >= 1
    await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_queued_reqs": 1}})
    snapshot = await world.snapshot()
    assert (snapshot.num_waiting, snapshot.counters.refused) == (3, 6 + 3)
    await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_queued_reqs": 0}})
    tasks += await ask(10)
    assert (await world.snapshot()).num_waiting == 13
    await world.send("POST", "/control/v1/resume")
    assert sorted([status for status, _ in await asyncio.gather(*tasks)]) == [200] * 14 + [429] * 6


# ---- a client that doesn't read --------------------------------------------------------------------------------


class TalkativeRunner(FakeRunner):
    """Twenty alternatives with each token."""

    def execute_model(self, scheduler_output):
        result = super().execute_model(scheduler_output)
        result.logprobs = {
            req_id: [[(token, -0.5), *((65 + other, -1.0 - other) for other in range(20))] for token in tokens]
            for req_id, tokens in zip(scheduler_output.num_scheduled_tokens, result.sampled_token_ids, strict=True)
        }
        return result


def peak_kib(pid: int) -> int:
    """The most memory a process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def ask_without_reading(port: int, body: dict) -> socket.socket:
    """A request over a connection that takes in as little as the system allows, and of which nothing is read."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return client


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the gateway's memory from /proc")
async def test_a_client_that_reads_nothing_of_20000_tokens_costs_bounded_memory_and_holds_up_nobody(
    start_world,
) -> None:
    world = await start_world(runner=TalkativeRunner(16, letters), max_model_len=2048, num_kv_blocks=3000)
    cut = asyncio.Event()
    world.gateway.link.on_events.append(
        lambda batch: cut.set() if any("client went away" in str(event) for event in batch.events) else None
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schedtop", "gateway", "--connect", str(world.served.path), "--port", "0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        warm = {"prompt": "x", "logprobs": 20, "max_tokens": 20, "n": 2}
        async with world.session.post(f"{url}/v1/completions", json=warm) as response:
            assert response.status == 200, await response.text()
        before = peak_kib(process.pid)
        body = {"prompt": "x", "logprobs": 20, "max_tokens": 1000, "n": 20, "stream": True}
        with ask_without_reading(int(url.rpartition(":")[2]), body):
            await world.until(lambda s: s.num_running == 20)
            other = {"prompt": "hello", "max_tokens": 100}
            async with world.session.post(f"{url}/v1/completions", json=other) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 100
            await cut.wait()
        snapshot = await world.until(lambda s: s.num_running + s.num_waiting == 0)
        assert snapshot.counters.finished == {"length": 3, "abort": 20}
        assert peak_kib(process.pid) - before < MAX_GROWTH_KIB
    finally:
        process.terminate()
        await process.wait()
