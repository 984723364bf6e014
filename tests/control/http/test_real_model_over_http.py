"""The whole way with the real model: `schedtop serve`, its gateway, and OpenAI's own client."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.e2e]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def url(folder: Path) -> AsyncIterator[str]:
    """Address of a gateway before the built-in model."""
    command = ["serve", "--socket", str(folder / "e.sock"), "--audit", str(folder / "audit.sqlite"), "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schedtop", *command, "--threads", "2", "--num-kv-blocks", "200", "--drain", "1",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while not (line := (await process.stdout.readline()).decode()).startswith("gateway on "):
            assert line, "the engine ended before the gateway was up"
        address = line.removeprefix("gateway on ").strip()
        await _ready(address)
        yield address
    finally:
        process.terminate()
        await process.communicate()


async def _ready(address: str) -> None:
    """Ask until the gateway is ready: it answers each time after a look at the engine."""
    async with aiohttp.ClientSession(address) as session:
        while True:
            async with session.get("/ready") as response:
                if response.status == 200:
                    return
                await asyncio.sleep(0.2)


async def test_the_capital_of_france_is_paris_streamed_or_not(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        (model,) = (await client.models.list()).data
        whole = await client.chat.completions.create(
            model=model.id, messages=QUESTION, temperature=0, max_completion_tokens=24
        )
        stream = await client.chat.completions.create(
            model=model.id, messages=QUESTION, temperature=0, max_completion_tokens=24, stream=True
        )
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        stopped = await client.completions.create(
            model=model.id, prompt="1, 2, 3, 4,", temperature=0, max_tokens=20, stop=["7"]
        )
    assert "Paris" in whole.choices[0].message.content
    assert streamed == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == " 5, 6, "
