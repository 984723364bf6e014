"""Starting a real `vllm serve` for tests: its environment, and when it is up."""

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

START_LIMIT_S = 240.0
SOURCES = Path(__file__).parents[2] / "src"


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
        "PYTHONPATH": f"{folder / 'shim'}:{SOURCES}",
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
