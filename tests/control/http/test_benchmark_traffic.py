"""The traffic of `vllm bench serve`, as its 0.32 sends and reads it; that program itself is not needed for this."""

import asyncio
import json
import uuid

import aiohttp
import pytest


class ChunkReader:
    """Reads a stream as the benchmark does: whatever has come, stripped, split at empty lines.

    What is left over counts as a message too once it is whole JSON by itself.
    """

    def __init__(self) -> None:
        self._buffer = ""

    def add(self, chunk: bytes) -> list[str]:
        self._buffer += chunk.strip().decode()
        *whole, self._buffer = self._buffer.split("\n\n")
        rest = self._buffer.removeprefix("data: ").strip()
        if rest == "[DONE]" or _is_json(rest):
            whole.append(self._buffer)
            self._buffer = ""
        return [message.strip() for message in whole if message.strip()]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class Measured:
    """What the benchmark notes of one request."""

    def __init__(self) -> None:
        self.text = ""
        self.num_chunks = 0
        self.usage: dict[str, int] = {}


def completion_body(index: int, **extra) -> dict:
    return {
        "model": "fake", "prompt": "x" * (8 + index), "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, **extra,
    }  # fmt: skip


def chat_body(index: int, **extra) -> dict:
    content = [{"type": "text", "text": "x" * (8 + index)}]
    return {
        "model": "fake", "messages": [{"role": "user", "content": content}], "max_completion_tokens": 16,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, **extra,
    }  # fmt: skip


BACKENDS = {"/v1/completions": completion_body, "/v1/chat/completions": chat_body}


async def measure(session: aiohttp.ClientSession, path: str, body: dict) -> Measured:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer EMPTY",
               "x-request-id": f"bench-{uuid.uuid4().hex[:8]}-0"}  # fmt: skip
    seen, reader = Measured(), ChunkReader()
    async with session.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            for message in reader.add(chunk):
                if message.startswith(":") or message == "data: [DONE]":
                    continue
                data = json.loads(message.removeprefix("data: "))
                if choices := data.get("choices"):
                    seen.num_chunks += 1
                    seen.text += choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
                else:
                    seen.usage = data["usage"]
    return seen


@pytest.mark.parametrize("path", BACKENDS)
@pytest.mark.parametrize("extra", [{}, {"temperature": 0.0, "top_k": 5, "top_p": 0.9, "min_p": 0.0, "priority": 1}])
async def test_every_stream_of_a_benchmark_is_whole_and_its_tokens_counted(start_world, path, extra) -> None:
    world = await start_world(max_num_batched_tokens=128, num_kv_blocks=60)
    bodies = [BACKENDS[path](index, **extra) for index in range(40)]
    seen = await asyncio.gather(*(measure(world.session, path, body) for body in bodies))
    assert [one.usage["completion_tokens"] for one in seen] == [16] * 40
    assert [len(one.text) for one in seen] == [16] * 40
    num_extra = len("user: \nassistant: ") if "chat" in path else 0
    assert [one.usage["prompt_tokens"] for one in seen] == [8 + index + num_extra for index in range(40)]
    snapshot = await world.snapshot()
    assert snapshot.counters.finished == {"length": 40}
    assert (snapshot.num_running, snapshot.pool.in_use) == (0, 0)


@pytest.mark.parametrize("path", BACKENDS)
async def test_the_first_chunk_comes_with_the_first_token_and_not_before(start_world, path) -> None:
    """The benchmark takes the first chunk's arrival for the time to the first token."""
    world = await start_world(knobs={"max_num_queued_reqs": 9})
    await world.send("POST", "/control/v1/pause", {"mode": "keep"})
    async with world.post(path, BACKENDS[path](0)) as response:
        assert response.status == 200
        await world.until(lambda s: s.num_waiting == 1)
        assert response.content.total_raw_bytes == 0
        await world.send("POST", "/control/v1/resume")
        assert b'"choices":[{' in await response.content.readuntil(b"\n\n")


async def test_a_token_that_shows_no_text_yet_has_its_chunk_too(start_world) -> None:
    """Random tokens are halves of characters; the gaps between tokens are measured by chunks."""
    smile = "\N{SLIGHTLY SMILING FACE}".encode()
    world = await start_world(next_token=lambda tokens: smile[(len(tokens) - 1) % 4], step_s=0.005)
    async with world.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 8}) as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("data: {")]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert "".join(texts) == smile.decode() * 2
    assert "" in texts


async def test_what_the_benchmark_asks_before_it_begins_is_answered(world) -> None:
    _, models = await world.send("GET", "/v1/models", token=None)
    assert (models["data"][0]["id"], models["data"][0]["root"]) == ("fake", "fake")
    body = {"model": "fake", "prompt": "hello", "add_special_tokens": False}
    _, tokens = await world.send("POST", "/tokenize", body, token=None)
    assert len(tokens["tokens"]) == 5
    async with world.session.get("/metrics") as response:
        assert not any(line.startswith("vllm:spec_decode") for line in (await response.text()).splitlines())
    async with world.session.post("/start_profile") as response:
        assert (response.status, response.reason) == (404, "Not Found")
