"""Tiny random checkpoints of each architecture, made by transformers: its logits and greedy tokens in fp32 are ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import NewRequestData

NUM_TOKENS = 64
SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama 2, all heads their own KV": lambda: LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "llama 3, stretched rope": lambda: LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama, linear rope, biases": lambda: LlamaConfig(
        **SMALL, rope_parameters=LINEAR_ROPE, attention_bias=True, mlp_bias=True
    ),
    "llama, tied embeddings": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral, sliding window": lambda: MistralConfig(**SMALL, sliding_window=24),
    "mistral, no window": lambda: MistralConfig(**SMALL, sliding_window=None, head_dim=32),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen2, window from the second layer": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
}


@dataclass
class Tiny:
    path: Path
    peer: Any
    expected: list[tuple[list[int], list[bool]]]
    """Per prompt, transformers' greedy tokens, and of which it was sure (the two likeliest 1e-3 apart or more)."""


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.manual_seed(len(request.param))
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param](), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers starts these as constants: make them count
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path, max_shard_size="60KB")
    assert (path / "model.safetensors.index.json").is_file()
    return Tiny(path, model, [reference(model, prompt) for prompt in make_prompts()])


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 7, 40, 75]
    return [torch.randint(3, 199, (length,), generator=generator).tolist() for length in lengths]


def reference(peer: Any, prompt: list[int]) -> tuple[list[int], list[bool]]:
    ids = torch.tensor([prompt])
    peer.generation_config.eos_token_id = None
    result = peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2).values
    return result.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1] >= 1e-3).tolist()


def all_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """Logits after every token of a prompt, computed in two chunks."""
    blocks = list(range(1, 2 + len(prompt) // runner.config.block_size))
    new = NewRequestData(
        req_id="r",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(),
        block_ids=blocks,
        num_computed_tokens=0,
    )
    runner.batch.add(new, seed=0)
    parts = []
    for count in (len(prompt) // 3, len(prompt) - len(prompt) // 3):
        if count:
            step = runner.batch.prepare({"r": count}, {})
            hidden = runner.model.forward(step.token_ids, step.positions, runner.kv_caches, step.meta)
            parts.append(runner.model.logits(hidden))
            runner.batch.advance(step)
    runner.batch.remove(["r"])
    return torch.cat(parts)


def make_config(**overrides: Any) -> EngineConfig:
    return EngineConfig(**{"num_kv_blocks": 64, "max_model_len": 256, **overrides})


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_logits_equal_those_of_transformers(tiny: Tiny, backend: str) -> None:
    runner = ModelRunner(str(tiny.path), make_config(), dtype="fp32", backend=backend)
    for prompt in make_prompts():
        with torch.inference_mode():
            expected = tiny.peer(input_ids=torch.tensor([prompt])).logits[0]
            found = all_logits(runner, prompt)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def generate(core: EngineCore, prompts: Sequence[list[int]]) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    while core.has_work:
        result = core.step()
        for output in result.outputs if result else []:
            outputs[int(output.request_id)] += output.new_token_ids
    core.shutdown()
    return outputs


@pytest.mark.parametrize(
    ("config", "knobs"),
    [
        ({"num_kv_blocks": 30}, {"max_num_batched_tokens": 23, "max_num_seqs": 3}),
        ({"num_kv_blocks": 14}, {}),
        ({"block_size": 256, "num_kv_blocks": 9}, {"async_scheduling": True}),
        ({"max_num_speculative_tokens": 3}, {"num_speculative_tokens": 3, "async_scheduling": True}),
    ],
    ids=["chunks", "preemptions", "large blocks, async", "drafts, async"],
)
def test_greedy_tokens_equal_those_of_transformers(tiny: Tiny, config: dict, knobs: dict) -> None:
    engine = make_config(**config)
    core = EngineCore(engine, ModelRunner(str(tiny.path), engine, dtype="fp32"), Knobs(**knobs))
    prompts = make_prompts()
    outputs = generate(core, prompts)
    assert sum(sum(is_sure) for _, is_sure in tiny.expected) >= 0.95 * NUM_TOKENS * len(prompts)
    for output, (tokens, is_sure) in zip(outputs, tiny.expected, strict=True):
        assert_same_text(output, tokens, is_sure)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_prompts_found_in_the_cache_give_the_tokens_of_transformers(tiny: Tiny, is_async: bool) -> None:
    engine = make_config(block_size=32)
    core = EngineCore(engine, ModelRunner(str(tiny.path), engine, dtype="fp32"), Knobs(async_scheduling=is_async))
    prompts = make_prompts()
    for prompt in prompts:
        core.add_request(f"first {len(prompt)}", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    while core.has_work:
        core.step()
    outputs = generate(core, prompts)
    assert core.scheduler.stats.prefix_cache_hits == 32 + 64
    for output, (tokens, is_sure) in zip(outputs, tiny.expected, strict=True):
        assert_same_text(output, tokens, is_sure)


def assert_same_text(output: list[int], tokens: list[int], is_sure: list[bool]) -> None:
    """Equal up to the end, or up to a token that transformers wasn't sure of: from there on the texts are others."""
    differing = [index for index in range(NUM_TOKENS) if output[index] != tokens[index]]
    assert not differing or not is_sure[differing[0]]
