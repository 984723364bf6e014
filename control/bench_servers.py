"""Contenders of `schedtop bench engine` behind HTTP: our server, llama.cpp's, vLLM's, or any with OpenAI's API.

Starts a server with settings like ours, waits until it is up, asks it, ends it. All are asked in the same words, of
OpenAI's `/v1/completions` with token ids as the prompt, and a server that answers with another number of tokens than it
was asked for is refused: its speed would not be comparable. No torch in here, and no output.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from schedtop.engine.errors import ConfigError, SchedtopError
from schedtop.engine.runner.bench_load import Load, Prompts, Round
from schedtop.engine.runner.loader.resolve import resolve_model

START_LIMIT_S = 900.0
"""vLLM compiles at start, on few cores for minutes."""
POLL_S = 0.2
END_S = 20.0
ANSWER_LIMIT_S = 1800.0
"""For a whole round."""
CONNECT_LIMIT_S = 10.0
NUM_LINES_SHOWN = 15
VLLM_KV_GIB = "4"


class ServerFailed(SchedtopError):
    """A server didn't start, went away, or answers something else than it was asked for."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is started. The address is added by whoever starts it."""

    name: str
    command: list[str]
    environment: dict[str, str] = {}
    """On top of this process's own."""


def schedtop_server(model: str, dtype: str, num_threads: int, load: Load, folder: Path) -> Launch:
    """Our own server for this load; its socket and files go to `folder`."""
    arguments = [
        "serve", "--model", model, "--dtype", dtype, "--threads", str(num_threads), "--drain", "0",
        "--max-num-seqs", str(load.concurrency), "--num-kv-blocks", str(load.num_kv_blocks),
        "--max-model-len", str(load.length + 1), "--socket", str(folder / "bench.sock"),
        "--audit", str(folder / "audit.sqlite"),
    ]  # fmt: skip
    return Launch(
        name=f"schedtop {dtype} over HTTP",
        # Tied to this process: it ends with us, however we end.
        command=[sys.executable, "-P", "-m", "schedtop.cli.tied", str(os.getpid()), *arguments],
        environment={"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder)},
    )


def llama_server(program: str, model: str, num_threads: int, load: Load) -> Launch:
    """llama.cpp's `llama-server` on the same GGUF file, a slot per request. Raises `ConfigError` for other models."""
    path = resolve_model(model)
    if not path.is_file():
        raise ConfigError(
            f"llama.cpp reads GGUF files only, and {path} is a folder: bench a .gguf, or without its server"
        )
    context = load.concurrency * (load.length + 1)
    threads = str(num_threads)
    options = [
        "--model", str(path), "--threads", threads, "--threads-batch", threads, "--parallel", str(load.concurrency),
        "--ctx-size", str(context), "--no-cache-prompt", "--cache-ram", "0", "--offline",
    ]  # fmt: skip
    return Launch(name="llama.cpp server", command=[program, *options])


def vllm_server(python: str, folder: Path, num_threads: int, load: Load) -> Launch:
    """vLLM's server under another Python, in fp32, on a Hugging Face folder.

    Its threads are bound to as many cores as asked for. Left to itself it computes with one fewer, and keeps that core
    for its scheduler: `VLLM_CPU_OMP_THREADS_BIND=auto` in the environment lets it. Raises `ConfigError` where there are
    fewer cores.
    """
    options = [
        "--model", str(folder), "--dtype", "float32", "--max-num-seqs", str(load.concurrency),
        "--max-model-len", str(load.length + 1), "--no-enable-prefix-caching",
    ]  # fmt: skip
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": _cores(num_threads), "VLLM_CPU_KVCACHE_SPACE": VLLM_KV_GIB,
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    environment = {name: os.environ.get(name, value) for name, value in defaults.items()}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *options]
    return Launch(name="vLLM server fp32", command=command, environment=environment)


def _cores(num_threads: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    if num_threads > len(cores):
        raise ConfigError(
            f"{num_threads} threads of vLLM need as many cores, and there are {len(cores)}: lower --threads"
        )
    return ",".join(map(str, cores[:num_threads]))


@contextmanager
def running(launch: Launch) -> Iterator["HttpServer"]:
    """The server, up, until the end of the block. Raises `ServerFailed` with its last words if it doesn't start."""
    url = f"http://127.0.0.1:{_free_port()}"
    with tempfile.TemporaryFile() as log:
        process = _start(launch, url, log.fileno())
        try:
            yield _started(launch.name, url, process, log.fileno())
        finally:
            _end(process)


def _start(launch: Launch, url: str, log: int) -> "subprocess.Popen[bytes]":
    command = [*launch.command, "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    environment = {**os.environ, **launch.environment}
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0, env=environment
        )
    except OSError as error:
        raise ServerFailed(f"{launch.name}: {command[0]} can't be run ({error.strerror}): give its path") from None


def _started(name: str, url: str, process: "subprocess.Popen[bytes]", log: int) -> "HttpServer":
    try:
        asyncio.run(_wait_until_up(name, url, process))
        return HttpServer(name, url)
    except ServerFailed as failure:
        raise ServerFailed(f"{failure}\n{_last_words(log)}".rstrip()) from None


class HttpServer:
    """A server that is up at a URL, as a contender. Raises `ServerFailed` if it isn't, or names no model."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = asyncio.run(self._first_model())

    def run(self, prompts: Prompts, output_tokens: int) -> Round:
        """See `Contender`. From the first request's sending to the last answer's end."""
        return asyncio.run(self._run(prompts, output_tokens))

    async def _first_model(self) -> str:
        async with _session() as session:
            listed = await self._ask(session, "GET", "/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ServerFailed(f"{self.name} at {self._url} lists no model under /v1/models") from None

    async def _run(self, prompts: Prompts, output_tokens: int) -> Round:
        async with _session() as session:
            start = time.perf_counter()
            asked = (self._complete(session, prompt, output_tokens) for prompt in prompts)
            answers = await asyncio.gather(*asked)
            seconds = time.perf_counter() - start
        return Round(tokens_per_s=len(prompts) * output_tokens / seconds, answers=answers)

    async def _complete(self, session: aiohttp.ClientSession, prompt: list[int], output_tokens: int) -> str:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True,
        }  # fmt: skip
        answer = await self._ask(session, "POST", "/v1/completions", body)
        try:
            usage, text = answer["usage"], answer["choices"][0]["text"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"])
        except (KeyError, IndexError, TypeError):
            raise ServerFailed(f"{self.name} answered without usage or text: it isn't OpenAI's API") from None
        if counts != (len(prompt), output_tokens):
            raise ServerFailed(
                f"{self.name} took {counts[0]} prompt tokens for {len(prompt)} and gave {counts[1]} tokens of "
                f"{output_tokens}: it must take token ids as they are and know ignore_eos"
            )
        return str(text)

    async def _ask(
        self, session: aiohttp.ClientSession, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            async with session.request(method, self._url + path, json=body) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ServerFailed(f"{self.name} at {self._url} doesn't answer: {reason}") from None
        if response.status != 200:
            words = content.decode(errors="replace").strip()[:300]
            raise ServerFailed(f"{self.name} answered {path} with status {response.status}: {words}")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError:
            raise ServerFailed(f"{self.name} answered {path} with something else than JSON: not OpenAI's API") from None


def _session() -> aiohttp.ClientSession:
    """No limit of connections: all requests are to be there at once."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S, sock_connect=CONNECT_LIMIT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _wait_until_up(name: str, url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_LIMIT_S
    async with _session() as session:
        while not await _is_healthy(session, url):
            if process.poll() is not None:
                raise ServerFailed(f"{name} ended at start with status {process.returncode}:")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{name} wasn't up within {START_LIMIT_S:g} s:")
            await asyncio.sleep(POLL_S)


async def _is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_words(log: int) -> str:
    size = os.fstat(log).st_size
    words = os.pread(log, 8192, max(0, size - 8192)).decode(errors="replace")
    return "\n".join(words.splitlines()[-NUM_LINES_SHOWN:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it and its children to end, then make them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
