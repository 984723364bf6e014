"""Engines from settings: a KV store between two of them, another scheduler, and what is refused before it starts."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schedtop.control.build import build
from schedtop.control.serve import serve
from schedtop.control.settings import load_settings
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import ConfigError
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import Viewport

PROMPT = list(range(50))


def make(**settings: Any) -> EngineCore:
    core, _ = build(load_settings(None, {"runner": "fake", **settings}))
    return core


def computed_for(core: EngineCore) -> int:
    """Tokens computed to answer the prompt."""
    core.add_request("r", PROMPT, SamplingParams(max_tokens=2))
    while core.scheduler.requests or core.has_work:
        core.step()
    core.shutdown()
    return core.snapshot(Viewport()).counters.computed_tokens


def test_two_engines_with_one_store_share_what_they_compute(tmp_path: Path) -> None:
    store = f"folder:{tmp_path}"
    assert computed_for(make(kv_store=store)) == 51
    assert computed_for(make(kv_store=store)) == 51 - 48


def test_engines_of_different_namespaces_share_nothing(tmp_path: Path) -> None:
    store = f"folder:{tmp_path}"
    assert computed_for(make(kv_store=store, kv_namespace="a")) == 51
    assert computed_for(make(kv_store=store, kv_namespace="b")) == 51


WAITING = """
from schedtop.control.build import build
from schedtop.control.settings import ServeSettings
from schedtop.engine.errors import ConfigError
try:
    build(ServeSettings(model="./nowhere", wait_policy="passive"))
except ConfigError:
    import torch
"""


def test_the_wait_policy_is_what_openmp_starts_with() -> None:
    """OpenMP itself tells, when torch brings it in."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", WAITING],
        env={**environment, "OMP_DISPLAY_ENV": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr


def test_a_kv_store_without_kv_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps no KV"):
        make(runner="simulated", kv_store=f"folder:{tmp_path}")


def test_another_scheduler_is_used_and_a_bad_one_is_refused() -> None:
    assert computed_for(make(scheduler_cls="schedtop.engine.sched.scheduler:Scheduler")) == 51
    with pytest.raises(ConfigError, match="isn't written module:Class"):
        make(scheduler_cls="Mine")


@pytest.mark.parametrize("runner", ["fake", "real"])
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_kv_blocks", 0, "num_kv_blocks=0 is below its minimum 2"),
        ("max_model_len", 0, "max_model_len=0 is below its minimum 2"),
        ("max_num_speculative_tokens", -1, "max_num_speculative_tokens=-1 is below its minimum 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_and_never_taken_for_the_default(runner, field, value, words) -> None:
    with pytest.raises(ConfigError, match=words):
        make(runner=runner, **{field: value})


def test_more_blocks_than_can_be_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="block_size=1048576 is above its maximum 65536"):
        make(block_size=1 << 20)
    with pytest.raises(ConfigError, match="num_kv_blocks=99999999999999 is above its maximum 10000000"):
        make(num_kv_blocks=99999999999999)
    with pytest.raises(ConfigError, match=r"need [\d,.]+ GiB, cpu has [\d,.]+ GiB: give at most \d+"):
        make(runner="real", device="cpu", num_kv_blocks=99999999999999)


def test_a_model_that_cannot_be_read_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF\x03\x00")
    settings = load_settings(
        None, {"model": str(file), "socket": str(tmp_path / "e.sock"), "audit": str(tmp_path / "audit.sqlite")}
    )
    with pytest.raises(ConfigError, match=r"cut\.gguf can't be read as GGUF"):
        serve(settings, say=lambda line: pytest.fail(f"it said {line}"))
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]
