"""LoRA adapters in PEFT's format: logits and greedy tokens are PEFT's own, several adapters in one batch; refusals."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import ConfigError, RequestRefused
from schedtop.engine.knobs import Knobs
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.sampling_params import SamplingParams

# PEFT asks transformers by an old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
NUM_TOKENS = 24
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "everything": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": r".*\.(k_proj|o_proj|up_proj|down_proj)",
        "rank_pattern": {"o_proj": 5},
        "alpha_pattern": {"layers.1.mlp.down_proj": 3},
    },
    "one layer": {"r": 3, "lora_alpha": 9, "target_modules": ["gate_proj", "k_proj"], "layers_to_transform": [1]},
}


@dataclass
class Peer:
    """PEFT on the same files."""

    folder: Path
    adapters: dict[str, Path]
    model: PeftModel

    def logits(self, adapter: str | None, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            if adapter is None:
                with self.model.disable_adapter():
                    return self.model(input_ids=torch.tensor([tokens])).logits[0]
            self.model.set_adapter(adapter.replace(" ", "-"))
            return self.model(input_ids=torch.tensor([tokens])).logits[0]

    def agrees(self, adapter: str | None, prompt: list[int], output: list[int]) -> bool:
        """Whether each token of an output is the greedy one behind those before it; near ties aside (1e-3)."""
        best = self.logits(adapter, prompt + output)[len(prompt) - 1 : -1].topk(2)
        margins = best.values[:, 0] - best.values[:, 1]
        assert (margins >= 1e-3).float().mean() >= 0.95
        pairs = zip(output, best.indices.tolist(), margins.tolist(), strict=True)
        return all(token == two[0] or (margin < 1e-3 and token == two[1]) for token, two, margin in pairs)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    torch.manual_seed(2)
    config = Qwen2Config(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    folder = tmp_path_factory.mktemp("base")
    base.save_pretrained(folder)
    paths = {}
    for name, settings in ADAPTERS.items():
        fresh = AutoModelForCausalLM.from_pretrained(folder)
        adapted = get_peft_model(fresh, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings))
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.2)
        paths[name] = tmp_path_factory.mktemp("adapter")
        adapted.save_pretrained(paths[name])
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    joined: Any = None
    for name, path in paths.items():
        if joined is None:
            joined = PeftModel.from_pretrained(model, path, adapter_name=name.replace(" ", "-"))
        else:
            joined.load_adapter(path, adapter_name=name.replace(" ", "-"))
    return Peer(folder, paths, joined.eval())


def make_engine(peer: Peer, names: Sequence[str] = tuple(ADAPTERS), **overrides: Any) -> EngineConfig:
    sizes = {"num_kv_blocks": 60, "max_model_len": 128, "max_adapters": len(names), "adapters": tuple(names)}
    return EngineConfig(**{**sizes, **overrides})


def make_core(peer: Peer, config: EngineConfig, **knobs: Any) -> EngineCore:
    paths = {name: peer.adapters[name] for name in config.adapters}
    return EngineCore(config, ModelRunner(str(peer.folder), config, dtype="fp32", adapters=paths), Knobs(**knobs))


def generate(core: EngineCore, asked: Sequence[tuple[str | None, list[int]]]) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in asked]
    settings = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for index, (adapter, prompt) in enumerate(asked):
        core.add_request(str(index), prompt, settings, adapter=adapter)
    while core.has_work:
        result = core.step()
        for output in result.outputs if result else []:
            outputs[int(output.request_id)] += output.new_token_ids
    assert core.self_check() == []
    core.shutdown()
    return outputs


def make_prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_logits_equal_those_of_peft(peer: Peer, adapter: str | None) -> None:
    config = make_engine(peer)
    core = make_core(peer, config)
    runner = core._runner
    assert isinstance(runner, ModelRunner)
    prompt = make_prompt(30)
    core.add_request("r", prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=0), adapter=adapter)
    caught: list[torch.Tensor] = []
    inner = runner.model.forward

    def forward(*arguments: Any) -> torch.Tensor:
        hidden = inner(*arguments)
        caught.append(runner.model.logits(hidden))
        return hidden

    runner.model.forward = forward  # type: ignore[method-assign]
    core.step()
    expected = peer.logits(adapter, prompt)
    assert (caught[0] - expected).abs().max() <= 1e-4 * expected.abs().max()
    plain = peer.logits(None, prompt)
    assert adapter is None or (expected - plain).abs().max() > 0.05 * plain.abs().max()


MIX: list[tuple[str | None, list[int]]] = [
    (name, make_prompt(length, seed))
    for seed, (name, length) in enumerate(zip([*ADAPTERS, None, *ADAPTERS, None], [20, 7, 40, 1, 33] * 2, strict=True))
]


@pytest.mark.parametrize(
    ("sizes", "knobs"),
    [
        ({}, {}),
        ({}, {"max_num_batched_tokens": 17, "max_num_seqs": 6}),
        ({"num_kv_blocks": 16}, {}),
        ({"max_adapters": 1}, {}),
        ({"max_num_speculative_tokens": 2}, {"num_speculative_tokens": 2, "async_scheduling": True}),
    ],
    ids=["one batch", "chunks", "preemptions", "one slot", "drafts, async"],
)
def test_a_batch_of_several_adapters_gives_the_greedy_tokens_of_peft(peer: Peer, sizes: dict, knobs: dict) -> None:
    core = make_core(peer, make_engine(peer, **sizes), **knobs)
    outputs = generate(core, MIX)
    for (adapter, prompt), output in zip(MIX, outputs, strict=True):
        assert len(output) == NUM_TOKENS and peer.agrees(adapter, prompt, output)
    assert core.scheduler.stats.preemptions > 0 or sizes.get("num_kv_blocks") != 16


def test_one_prompt_under_several_adapters_shares_no_cached_blocks(peer: Peer) -> None:
    prompt = make_prompt(50)
    core = make_core(peer, make_engine(peer), max_num_seqs=1)
    asked = [(name, prompt) for name in (None, *ADAPTERS, None, *ADAPTERS)]
    outputs = generate(core, asked)
    assert all(peer.agrees(name, prompt, output) for (name, _), output in zip(asked, outputs, strict=True))
    assert len({tuple(output) for output in outputs}) == len(ADAPTERS) + 1
    assert core.scheduler.stats.prefix_cache_hits == (len(ADAPTERS) + 1) * 48


def test_an_adapter_by_another_name_is_refused_at_the_door(peer: Peer) -> None:
    core = make_core(peer, make_engine(peer, ["attention"]))
    with pytest.raises(RequestRefused, match="adapter 'other' isn't loaded here; loaded are attention"):
        core.add_request("r", [5], SamplingParams(max_tokens=1), adapter="other")
    core.shutdown()


# ---- files that can't be served ----------------------------------------------------------------------------------


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change(folder: Path, alter: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    alter(tensors)
    save_file(tensors, file)


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])


FIRST = "base_model.model.model.layers.0.self_attn.q_proj."
BROKEN: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "method": (lambda f: edit(f, peft_type="IA3"), ["peft_type=IA3", "LORA is"]),
    "DoRA": (lambda f: edit(f, use_dora=True), ["use_dora=True"]),
    "whole modules": (lambda f: edit(f, modules_to_save=["lm_head"]), ["modules_to_save=['lm_head']"]),
    "biases": (lambda f: edit(f, bias="all"), ["bias=all"]),
    "changed base": (lambda f: edit(f, init_lora_weights="pissa"), ["init_lora_weights=pissa"]),
    "unheard of": (lambda f: edit(f, use_novelty=True), ["use_novelty=True"]),
    "embeddings": (lambda f: edit(f, target_modules=["q_proj", "v_proj", "embed_tokens"]), ["embed_tokens", "q_proj,"]),
    "foreign module": (lambda f: edit(f, target_modules=["c_attn"]), ["c_attn"]),
    "no rank": (lambda f: edit(f, r=None), ["lacks r"]),
    "missing tensor": (lambda f: change(f, lambda t: t.pop(f"{FIRST}lora_B.weight")), [f"lacks the tensor {FIRST}"]),
    "other shape": (lambda f: edit(f, r=5), ["lora_A", "[4, 64]", "[5, 64]"]),
    "magnitudes": (
        lambda f: change(f, lambda t: t.update({f"{FIRST}lora_magnitude_vector": torch.ones(64)})),
        ["lora_magnitude_vector", "DoRA"],
    ),
    "replaced module": (
        lambda f: change(f, lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(9, 9)})),
        ["lm_head", "modules_to_save"],
    ),
    "truncated": (cut, ["adapter_model.safetensors", "can't be read"]),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), ["no adapter_model.safetensors"]),
    "no settings": (lambda f: (f / "adapter_config.json").unlink(), ["adapter_config.json can't be read"]),
    "no folder": (shutil.rmtree, ["no folder at"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_adapter_that_cannot_be_served_is_refused_by_the_name_of_what_is_wrong(
    peer: Peer, tmp_path: Path, what: str
) -> None:
    spoil, words = BROKEN[what]
    folder = Path(shutil.copytree(peer.adapters["attention"], tmp_path / "adapter"))
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        ModelRunner(str(peer.folder), make_engine(peer, ["a"]), adapters={"a": folder})
    assert all(word in str(caught.value) for word in words), caught.value


def test_scheduler_and_runner_must_name_the_same_adapters(peer: Peer) -> None:
    with pytest.raises(ConfigError, match="knows the adapters a, the runner is given none"):
        ModelRunner(str(peer.folder), make_engine(peer, ["a"]))
    with pytest.raises(ConfigError, match="max_adapters=2, but no adapter"):
        ModelRunner(str(peer.folder), make_engine(peer, [], max_adapters=2))
    with pytest.raises(ConfigError, match="max_adapters=0 leaves no slot for a"):
        make_engine(peer, ["a"], max_adapters=0)
