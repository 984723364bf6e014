"""Memory as computed beforehand is memory as taken: to the byte for tensors, and by the process as seen outside."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from schedtop.cli.serve import serve
from schedtop.engine.config import EngineConfig
from schedtop.engine.runner.loader.checkpoint import open_checkpoint
from schedtop.engine.runner.loader.peft import load_adapter
from schedtop.engine.runner.memory_plan import plan_memory
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.runner.placement import choose_placement

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, Any] = {
    "llama, biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama, tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=32),
}


def tensor_bytes() -> int:
    """Of all tensors alive, memory that several share counted once."""
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("what", MODELS)
def test_tensors_take_what_was_planned_to_the_byte(tmp_path: Path, what: str) -> None:
    model = AutoModelForCausalLM.from_config(MODELS[what]())
    model.save_pretrained(tmp_path / "model")
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"v_proj": 5})
    get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    del model
    config = EngineConfig(
        num_kv_blocks=9,
        max_num_seqs=5,
        max_model_len=100,
        max_num_speculative_tokens=2,
        max_adapters=1,
        adapters=("a",),
    )
    shape = open_checkpoint(str(tmp_path / "model")).config
    placement = choose_placement(shape, config.block_size, dtype="fp32", device="cpu")
    plan = plan_memory(shape, config, placement, [load_adapter("a", tmp_path / "adapter", shape)])
    before = tensor_bytes()
    runner = ModelRunner(
        str(tmp_path / "model"), config, dtype="fp32", device="cpu", adapters={"a": tmp_path / "adapter"}
    )
    taken = tensor_bytes() - before + runner.batch.token_ids.nbytes + runner.batch.block_table.nbytes
    assert taken == sum(part.num_bytes for part in plan if part.name != "largest step")


MEASURE = """
import gc, json, os
import torch
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs
from schedtop.engine.runner.loader.checkpoint import open_checkpoint
from schedtop.engine.runner.memory_plan import plan_memory
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.runner.placement import choose_placement
from schedtop.engine.sampling_params import SamplingParams


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(num_kv_blocks):
    config = EngineConfig(num_kv_blocks=num_kv_blocks, max_model_len=512, max_num_batched_tokens=256, max_num_seqs=16)
    runner = ModelRunner("smollm2", config, num_threads=1)
    for cache in runner.kv_caches:
        cache.fill_(0.5)
    core = EngineCore(config, runner, Knobs(prefix_caching=False, max_num_batched_tokens=256, max_num_seqs=16))
    for index in range(16):
        core.add_request(str(index), list(range(100, 116)), SamplingParams(max_tokens=2, top_p=0.9))
    while core.has_work:
        core.step()
    return core, runner, config


start = resident()
core, runner, config = run(601)
taken = resident() - start
shape = open_checkpoint("smollm2").config
plan = plan_memory(shape, config, choose_placement(shape, 16))
print(json.dumps([taken, sum(part.num_bytes for part in plan), runner.info.dtype]))
"""


@pytest.mark.model
def test_the_process_grows_by_what_was_planned() -> None:
    """What torch's own products and Python's objects add is bounded here: a quarter of the plan."""
    done = subprocess.run([sys.executable, "-P", "-c", MEASURE], capture_output=True, text=True, check=True)
    taken, planned, dtype = json.loads(done.stdout)
    assert 0.9 * planned <= taken <= 1.25 * planned, (taken, planned, dtype)


@pytest.mark.model
def test_serve_explains_the_memory_and_ends() -> None:
    done = CliRunner().invoke(
        serve, ["--explain-memory", "--num-kv-blocks", "101", "--dtype", "fp32", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.startswith("  ")}
    assert "101 blocks of 16 tokens, 737,280 bytes each" in lines["KV"] and " 71.0 MiB" in lines["KV"]
    assert " 513.1 MiB" in lines["weights"] and "total" in lines
    refused = CliRunner().invoke(serve, ["--explain-memory", "--runner", "fake"])
    assert refused.exit_code != 0 and "holds no model" in str(refused.exception)
