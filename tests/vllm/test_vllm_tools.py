"""The same tools on a real vLLM: command line, gateway, recorder, forecast, and the page without the plugin."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from vllm_server import Served

from schedtop.control.discovery import token_path
from schedtop.control.messages import Pause, Resume

BUSY = [f"prompt number {i}" for i in range(6)]


def command_line(served: Served, *arguments: str, **variables: str) -> Any:
    environment = {**os.environ, "SCHEDTOP_CONNECT": served.socket, "NO_COLOR": "1", "COLUMNS": "140", **variables}
    return asyncio.create_subprocess_exec(
        sys.executable, "-c", "from schedtop.cli.main import cli; cli()", *arguments,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def run(served: Served, *arguments: str, **variables: str) -> str:
    process = await command_line(served, *arguments, **variables)
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode()


@asynccontextmanager
async def gateway(served: Served) -> AsyncIterator[str]:
    process = await command_line(served, "gateway", "--port", "0", "--drain", "0")
    try:
        while not (found := re.search(rb"gateway on (\S+)", await asyncio.wait_for(process.stdout.readline(), 60))):
            pass
        yield found[1].decode()
    finally:
        process.terminate()
        await process.communicate()


async def test_a_knob_is_turned_from_the_shell(served: Served, operator: Any) -> None:
    output = await run(served, "knobs", "set", "max_num_seqs=5")
    assert "max_num_seqs" in output
    assert (await operator.look()).knobs.max_num_seqs == 5


async def test_the_gateway_steers_measures_and_says_where_requests_go(served: Served, operator: Any, load: Any) -> None:
    load.keep_on("through vLLM itself", 3900)
    await operator.settle(lambda snapshot: snapshot.num_running == 1 and snapshot.counters.generated_tokens > 0)
    await operator.request(Pause(mode="keep"))
    async with gateway(served) as url, aiohttp.ClientSession() as session:
        token = token_path(Path(served.socket)).read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        async with session.get(f"{url}/metrics", headers=headers) as response:
            page = await response.text()
        running = re.search(r"vllm:num_requests_running\{[^}]*\} (\S+)", page)
        assert running is not None
        assert float(running[1]) == (await operator.look()).num_running
        async with session.get(f"{url}/control/v1/snapshot", headers=headers) as response:
            assert response.status == 200, await response.text()
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
        assert response.status == 403
        assert "vllm serve" in answer["error"]["message"]
        output = await run(
            served, "knobs", "set", "max_num_batched_tokens=128", SCHEDTOP_CONNECT=url, SCHEDTOP_TOKEN=token
        )
        assert "max_num_batched_tokens" in output
    assert (await operator.look()).knobs.max_num_batched_tokens == 128
    await operator.request(Resume())


async def test_a_forecast_is_made_from_the_live_state(served: Served, operator: Any, load: Any) -> None:
    for prompt in BUSY:
        load.keep_on(prompt, 1000)
    await operator.settle(lambda snapshot: snapshot.step > 300 and snapshot.num_running == len(BUSY))
    output = json.loads(await run(served, "forecast", "--set", "max_num_seqs=2", "--horizon", "5s", "--json"))
    assert output["changes"] == {"max_num_seqs": [32, 2]}
    assert output["num_draws"] >= 1


async def test_the_page_of_vllm_itself_is_read_without_the_plugins_help(
    served: Served, load: Any, operator: Any
) -> None:
    task = load.add("seen on the page", 1500)
    await operator.settle(lambda snapshot: snapshot.num_running == 1)
    await task
    (engine,) = json.loads(await run(served, "--json", SCHEDTOP_CONNECT=served.url))["engines"]
    assert engine["kind"] == "vllm" and engine["num_blocks"] == 260
    assert engine["counters"]["generated_tokens"] >= 1500
