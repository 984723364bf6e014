"""Servers as contenders of a benchmark: asked in the same words, refused when not comparable, ended when done."""

import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import openai_server
import pytest
from openai_server import OpenAiServer

from schedtop.control.bench_servers import (
    HttpServer,
    Launch,
    ServerFailed,
    llama_server,
    running,
    vllm_server,
)
from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.bench_load import Load

LOAD = Load(concurrency=4, prompt_tokens=20, output_tokens=5)
PROMPTS = LOAD.prompts(1000, "a seed")
FAKE = [sys.executable, openai_server.__file__]


def is_there(url: str) -> bool:
    address = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((str(address.hostname), int(address.port or 0))) == 0


@pytest.fixture
def peer() -> Iterator[OpenAiServer]:
    with openai_server.serving() as server:
        yield server


def test_all_are_asked_at_once_for_the_same_number_of_tokens_greedily() -> None:
    with openai_server.serving(together=len(PROMPTS)) as peer:  # answers nobody before all are there
        result = HttpServer("peer", peer.url).run(PROMPTS, 5)
    assert sorted(body["prompt"] for body in peer.bodies) == sorted(PROMPTS)
    for body in peer.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("tiny", 5, 0.0, True)
    assert result.answers == ["xxxxx"] * 4
    assert result.tokens_per_s > 0


def test_a_url_may_end_as_openai_clients_write_it(peer: OpenAiServer) -> None:
    assert HttpServer("peer", f"{peer.url}/v1/").run(PROMPTS[:1], 5).answers == ["xxxxx"]


def test_a_server_that_gives_another_number_of_tokens_is_refused(peer: OpenAiServer) -> None:
    server = HttpServer("peer", peer.url)
    peer.too_few = 2
    with pytest.raises(ServerFailed, match=r"peer took 20 prompt tokens for 20 and gave 3 tokens of 5: .*ignore_eos"):
        server.run(PROMPTS[:1], 5)


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        ((400, b"unknown field ignore_eos"), "peer answered /v1/completions with status 400: unknown field ignore_eos"),
        ((200, b"<html>"), "peer answered /v1/completions with something else than JSON"),
        ((200, b"{}"), "peer answered without usage or text"),
    ],
)
def test_what_a_server_answers_instead_is_told(peer: OpenAiServer, instead: tuple[int, bytes], words: str) -> None:
    server = HttpServer("peer", peer.url)
    peer.instead = instead
    with pytest.raises(ServerFailed, match=words):
        server.run(PROMPTS[:1], 5)


def test_a_server_without_a_model_is_refused(peer: OpenAiServer) -> None:
    peer.models = []
    with pytest.raises(ServerFailed, match=f"peer at {peer.url} lists no model"):
        HttpServer("peer", peer.url)


def test_nobody_there_is_told_with_the_address() -> None:
    with openai_server.serving() as peer:
        url = peer.url
    with pytest.raises(ServerFailed, match=f"peer at {url} doesn't answer"):
        HttpServer("peer", url)


def test_a_started_server_is_up_inside_the_block_and_gone_after_it() -> None:
    with running(Launch(name="peer", command=[*FAKE, "--some", "option"])) as server:
        assert server.run(PROMPTS, 5).answers == ["xxxxx"] * 4
        url = server._url
        assert is_there(url)
    assert not is_there(url)


def test_a_server_ends_with_a_block_that_an_error_leaves_and_adds_nothing_to_it() -> None:
    urls = []

    def fail_inside() -> None:
        with running(Launch(name="peer", command=FAKE)) as server:
            urls.append(server._url)
            raise ServerFailed("another failed")

    with pytest.raises(ServerFailed) as caught:
        fail_inside()
    assert str(caught.value) == "another failed"
    assert not is_there(urls[0])


def test_the_last_words_of_a_server_that_does_not_start_are_told() -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with pytest.raises(ServerFailed, match="peer ended at start with status 3:\nno such model"):
        running(Launch(name="peer", command=command)).__enter__()


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=f"{tmp_path}/gone can't be run .No such file or directory.: give its path"):
        running(Launch(name="peer", command=[f"{tmp_path}/gone"])).__enter__()


def test_llama_server_gets_the_same_file_threads_and_a_slot_for_each(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    command = llama_server("llama-server", str(model), 3, LOAD).command
    given = dict(pairwise(command))
    assert command[0] == "llama-server"
    assert (given["--model"], given["--threads"], given["--threads-batch"]) == (str(model), "3", "3")
    assert int(given["--parallel"]) == 4
    assert int(given["--ctx-size"]) // 4 >= LOAD.length  # the slots share it


def test_llama_server_is_refused_for_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"llama\.cpp reads GGUF files only"):
        llama_server("llama-server", str(tmp_path), 3, LOAD)


def test_vllm_is_bound_to_as_many_cores_as_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 7, 2, 5})
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    launch = vllm_server("python", tmp_path, 3, LOAD)
    assert launch.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,4,5"
    assert launch.command[:2] == ["python", "-m"] and str(tmp_path) in launch.command
    with pytest.raises(ConfigError, match="5 threads of vLLM need as many cores, and there are 4"):
        vllm_server("python", tmp_path, 5, LOAD)


def test_what_the_environment_says_to_vllm_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    assert vllm_server("python", tmp_path, 1, LOAD).environment["VLLM_CPU_OMP_THREADS_BIND"] == "auto"
