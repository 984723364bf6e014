"""Starting a real `vllm serve` for tests: its environment, and when it is up."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 600.0
SOURCES = Path(__file__).parents[2] / "src"
SUPPORT = Path(__file__).parent
PLAIN = "schedtop.control.vllm.plugin.SchedtopScheduler"
SYNC, ASYNC = "vllm_variants.SyncVariant", "vllm_variants.AsyncVariant"


@dataclass(frozen=True)
class Served:
    """A running vLLM: its HTTP address, its control socket, its process and what it logs."""

    url: str
    socket: str
    process: subprocess.Popen[bytes]
    log: Path


def environment(folder: Path, runtime: Path) -> dict[str, str]:
    """What vLLM needs to run on a CPU without a network, and where our socket goes."""
    return {
        **os.environ,
        "PYTHONPATH": f"{folder / 'shim'}:{SOURCES}:{SUPPORT}",
        "XDG_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": str(runtime / "state"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_TARGET_DEVICE": "cpu",
    }


def wait_for_start(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until vLLM says that it is up; fails with its log when it ends instead."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if "Application startup complete" in text:
            return
        assert process.poll() is None, f"vLLM ended with {process.returncode}:\n{text[-4000:]}"
        time.sleep(0.5)
    raise AssertionError(f"vLLM wasn't up within {START_LIMIT_S:g} s:\n{log.read_text(errors='replace')[-4000:]}")


@contextmanager
def serving(folder: Path, runtime: Path, port: int, scheduler: str | None = PLAIN, *options: str) -> Iterator[Served]:
    """A `vllm serve` of the tiny model until the end of the block; `scheduler=None`: vLLM's own, without the plugin."""
    log = runtime / f"vllm-{time.monotonic_ns()}.log"
    command = [
        str(folder / "venv/bin/vllm"), "serve", str(folder / "model"), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--max-model-len", "4096", "--max-num-seqs", "32", "--max-num-batched-tokens", "512",
        "--num-gpu-blocks-override", "260", *(["--scheduler-cls", scheduler] if scheduler else []), *options,
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment(folder, runtime),
            start_new_session=True,
        )
    try:
        wait_for_start(process, log)
        yield Served(f"http://127.0.0.1:{port}", str(runtime / "schedtop/vllm.sock"), process, log)
    finally:
        end(process)


def end(process: "subprocess.Popen[bytes]", limit_s: float = 30.0) -> int:
    """Ask the process and its children to end; kill them after `limit_s`. Returns the exit status."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        kill(process)
    except ProcessLookupError:
        pass
    return process.wait()


def kill(process: "subprocess.Popen[bytes]") -> None:
    """`kill -9` the process and its children."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
