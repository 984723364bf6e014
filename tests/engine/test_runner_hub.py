"""Hub ids through huggingface_hub against a hub of our own on this machine: fetched, cached, refused in words."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from schedtop.engine.runner.loader.checkpoint import open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = """
import sys
from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.loader.resolve import resolve_model
try:
    print(resolve_model(sys.argv[1]))
except ConfigError as error:
    sys.exit(str(error))
"""


class FakeHub(BaseHTTPRequestHandler):
    """Just the routes that `snapshot_download` asks for. `files` and `asked` are set on a subclass."""

    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        if path.startswith("/api/models/owner/gated"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path == "/api/models/owner/tiny/revision/main" or path == "/api/models/owner/tiny":
            siblings = [{"rfilename": name} for name in self.files]
            self._send_json({"id": "owner/tiny", "sha": COMMIT, "private": False, "siblings": siblings})
        elif path == f"/api/models/owner/tiny/tree/{COMMIT}":
            self._send_json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
                    for name, content in self.files.items()
                ]
            )
        elif (name := path.removeprefix(f"/owner/tiny/resolve/{COMMIT}/")) in self.files:
            content = self.files[name]
            self._send(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{_oid(content)}"'})
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Hub:
    def __init__(self, url: str, home: Path, asked: list[str], peer: Any) -> None:
        self.url, self.home, self.asked, self.peer = url, home, asked, peer

    def resolve(self, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """In a fresh process: the library reads its settings when it is imported."""
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "")
        return subprocess.run(
            [sys.executable, "-P", "-c", CODE, model],
            env={**os.environ, **proxies, **settings, **environment},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    peer = AutoModelForCausalLM.from_config(config)
    peer.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    files = {file.name: file.read_bytes() for file in (tmp_path / "source").iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1
    files |= {"consolidated.safetensors": b"the same again", "pytorch_model.bin": b"a pickle", "README.md": b"words"}
    handler = type("Handler", (FakeHub,), {"files": files, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", tmp_path / "home", handler.asked, peer)
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_brings_the_weights_of_all_shards_and_works_offline_from_then_on(hub: Hub) -> None:
    done = hub.resolve("owner/tiny")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    checkpoint = open_checkpoint(str(path))
    for name, tensor in hub.peer.state_dict().items():
        assert torch.equal(checkpoint.take(name, tensor.shape), tensor)
    fetched = {name.rpartition("/")[2] for name in hub.asked if name.startswith("GET /owner")}
    assert "config.json" in fetched and not fetched & {"consolidated.safetensors", "pytorch_model.bin", "README.md"}
    num_asked = len(hub.asked)
    again = hub.resolve("owner/tiny", HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout and len(hub.asked) == num_asked


@pytest.mark.parametrize(
    ("model", "environment", "words"),
    [
        ("owner/nothing", {}, "it isn't there, or is private"),
        ("owner/gated", {}, "access to it must be asked for there"),
        ("owner/tiny", {"HF_HUB_OFFLINE": "1"}, "the hub can't be reached (OfflineModeIsEnabled) and no copy"),
        ("owner/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub can't be reached (ConnectError) and no copy"),
    ],
    ids=["unknown", "gated", "offline", "no network"],
)
def test_what_keeps_a_model_away_is_told_plainly(hub: Hub, model: str, environment: dict[str, str], words: str) -> None:
    done = hub.resolve(model, **environment)
    assert done.returncode == 1
    assert f"model {model} is neither a path here" in done.stderr and words in done.stderr
    assert "give a folder that holds it" in done.stderr and "Traceback" not in done.stderr
