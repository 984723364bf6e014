"""A real `vllm serve` with the plugin, on a tiny random model. Needs the environment that `make test-vllm` builds.

SCHEDTOP_VLLM names its folder; `make test` leaves these tests out.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_server import Served, environment, wait_for_start

PORT = 8473


@pytest.fixture(scope="session")
def vllm_folder() -> Path:
    folder = os.environ.get("SCHEDTOP_VLLM")
    assert folder, "run these tests with `make test-vllm`: SCHEDTOP_VLLM names the environment it builds"
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def served(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runtime = tmp_path_factory.mktemp("r")
    log = runtime / "vllm.log"
    command = [
        str(vllm_folder / "venv/bin/vllm"), "serve", str(vllm_folder / "model"), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(PORT), "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--max-model-len", "4096", "--max-num-seqs", "32", "--max-num-batched-tokens", "512",
        "--num-gpu-blocks-override", "260", "--scheduler-cls", "schedtop.control.vllm.plugin.SchedtopScheduler",
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment(vllm_folder, runtime),
            start_new_session=True,
        )
    try:
        wait_for_start(process, log)
        yield Served(f"http://127.0.0.1:{PORT}", str(runtime / "schedtop/vllm.sock"), process, log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
