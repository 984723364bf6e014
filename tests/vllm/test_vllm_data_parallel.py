"""A vLLM of two data-parallel engines: each has a socket of its own, and together they are a fleet."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from processes import Home
from terminal import Terminal
from vllm_server import PLAIN, Served, serving

from schedtop.control.client import Client
from schedtop.control.messages import GetSnapshot, SetKnobs, SnapshotReply

PORT = 8476
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def two(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--data-parallel-size", "2", "--api-server-count", "1")
    with serving(vllm_folder, tmp_path_factory.mktemp("d"), PORT, PLAIN, *options) as served:
        yield served


def sockets(served: Served) -> list[str]:
    return [str(path) for path in sorted(Path(served.socket).parent.glob("*.sock"))]


def test_each_rank_has_its_socket(two: Served) -> None:
    assert [Path(path).name for path in sockets(two)] == ["vllm-dp0.sock", "vllm-dp1.sock"]


async def test_each_rank_is_steered_by_itself_and_together_they_serve(two: Served) -> None:
    first, second = sockets(two)
    async with await Client.connect(first, name="test") as one, await Client.connect(second, name="test") as other:
        await one.request(SetKnobs(changes={"max_num_seqs": 3}))
        async with aiohttp.ClientSession() as session:
            for i in range(NUM_REQUESTS):
                body = {"model": "tiny", "prompt": f"number {i}", "max_tokens": 5, "ignore_eos": True}
                async with session.post(f"{two.url}/v1/completions", json=body) as response:
                    assert (await response.json())["usage"]["completion_tokens"] == 5
        replies = [await client.request(GetSnapshot()) for client in (one, other)]
    seen = [reply.update.snapshot for reply in replies if isinstance(reply, SnapshotReply)]
    assert [snapshot.knobs.max_num_seqs for snapshot in seen] == [3, 32]
    assert sum(snapshot.counters.generated_tokens for snapshot in seen) == 5 * NUM_REQUESTS


def test_the_screen_shows_both(two: Served, tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.environment["XDG_RUNTIME_DIR"] = str(Path(two.socket).parents[1])
    with Terminal(home, columns=160, lines=45) as terminal:
        terminal.wait_for_text("vllm-dp0")
        terminal.wait_for_text("vllm-dp1")
        terminal.press("q")  # back from the fleet to the first engine
        terminal.wait_for_text("vllm-dp0 tiny")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0


def test_a_playbook_is_played_on_all_of_them(two: Served, tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.environment["XDG_RUNTIME_DIR"] = str(Path(two.socket).parents[1])
    book = tmp_path / "book.yaml"
    book.write_text("name: all\nsteps:\n  - set: {max_num_batched_tokens: 99}\n  - wait: 100ms\n")
    run = home.schedtop("play", str(book), "--all")
    assert run.returncode == 0, run.stdout + run.stderr
    for path in sockets(two):
        knobs = home.json("--connect", path, "--once", "--json")["snapshot"]["knobs"]
        assert knobs["max_num_batched_tokens"] == 99
