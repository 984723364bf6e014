"""Files: GGUF in each supported precision against transformers, and one clear error for all that can be wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.loader.checkpoint import gguf_name, open_checkpoint, undo_interleaving
from schedtop.engine.runner.loader.gguf import GgufFile
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.runner.placement import num_blocks_for
from schedtop.engine.runner.tokenizer import load_tokenizer
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import NewRequestData

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
Quant = gguf.GGMLQuantizationType


def make_peer(family: str = "llama", **overrides: Any) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(
        CONFIGS[family](**{**SMALL, **overrides}), attn_implementation="eager"
    ).eval()


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As converters store q and k of the llama family."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(peer: Any, path: Path, quant: Quant = Quant.F32, skip: str = "", architecture: str = "") -> None:
    """Write a peer's weights, matrices in `quant`, and give the peer the values as they are in the file."""
    config = peer.config
    family = architecture or config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in peer.state_dict().items():
        if gguf_name(name) == skip:
            continue
        part = name.split(".")[-2]
        values = tensor.numpy()
        is_turned = family == "llama" and part in heads
        stored = interleave(values, heads[part]) if is_turned else values
        kind = quant if tensor.ndim == 2 else Quant.F32
        packed = gguf.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        read = torch.from_numpy(gguf.dequantize(packed, kind).reshape(stored.shape).copy())
        tensor.copy_(undo_interleaving(read, heads[part]) if is_turned else read)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_config(**overrides: Any) -> EngineConfig:
    return EngineConfig(**{"num_kv_blocks": 16, "max_model_len": 64, "max_num_seqs": 4, **overrides})


def logits_of(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    new = NewRequestData(
        req_id="r",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(),
        block_ids=[3, 1],
        num_computed_tokens=0,
    )
    runner.batch.add(new, seed=0)
    step = runner.batch.prepare({"r": len(prompt)}, {})
    with torch.inference_mode():
        return runner.model.logits(runner.model.forward(step.token_ids, step.positions, runner.kv_caches, step.meta))


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        *[("llama", quant) for quant in (Quant.F32, Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q8_0)],
        ("qwen2", Quant.Q8_0),
        ("qwen3", Quant.F16),
    ],
    ids=str,
)
def test_gguf_logits_equal_those_of_transformers(tmp_path: Path, family: str, quant: Quant) -> None:
    peer = make_peer(family)
    write_gguf(peer, tmp_path / "tiny.gguf", quant)
    prompt = list(range(5, 30))
    with torch.inference_mode():
        expected = peer(input_ids=torch.tensor([prompt])).logits[0]
    found = logits_of(ModelRunner(str(tmp_path / "tiny.gguf"), make_config(), dtype="fp32"), prompt)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("quant", [Quant.Q4_K, Quant.Q6_K], ids=str)
def test_k_quants_are_read_in_shape_and_order(tmp_path: Path, quant: Quant) -> None:
    block, size = gguf.GGML_QUANT_SIZES[quant]
    raw = np.random.default_rng(1).integers(0, 60, (6, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "k.gguf").tensor("token_embd.weight")
    assert found.shape == (6, 2 * block)
    rows = [gguf.dequantize(raw[row], quant) for row in range(6)]
    np.testing.assert_array_equal(found, np.stack(rows))


def refused(model: Path | str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelRunner(str(model), make_config(), **options)
    return str(caught.value)


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    make_peer().save_pretrained(path)
    return path


@pytest.fixture
def folder(good_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def drop(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BROKEN: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "architecture": (lambda f: edit_config(f, architectures=["GPT2LMHeadModel"]), ["GPT2LMHeadModel", "not supported"]),
    "rope": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), ["yarn"]),
    "activation": (lambda f: edit_config(f, hidden_act="gelu"), ["hidden_act=gelu"]),
    "quantised": (lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}), ["gptq"]),
    "missing size": (lambda f: edit_config(f, hidden_size=None), ["lacks hidden_size"]),
    "wrong size": (lambda f: edit_config(f, vocab_size=100), ["embed_tokens", "[96, 64]", "[100, 64]"]),
    "heads": (lambda f: edit_config(f, num_key_value_heads=3), ["4 attention heads", "3 KV heads"]),
    "missing tensor": (lambda f: drop(f, "model.layers.1.mlp.up_proj.weight"), ["model.layers.1.mlp.up_proj.weight"]),
    "truncated": (cut, ["model.safetensors", "can't be read"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no .safetensors file"]),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json can't be read"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused_by_the_name_of_what_is_wrong(folder: Path, what: str) -> None:
    spoil, words = BROKEN[what]
    spoil(folder)
    message = refused(folder)
    assert all(word in message for word in words), message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_peer().save_pretrained(tmp_path, max_shard_size="60KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert lost.name in refused(tmp_path)


def test_a_gguf_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(make_peer(), file)
    file.write_bytes(file.read_bytes()[:-5000])
    assert "tiny.gguf" in refused(file) and "truncated" in refused(file)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"something else entirely" * 10)
    assert "can't be read as GGUF" in refused(file)


def test_a_gguf_file_without_a_tensor_names_it(tmp_path: Path) -> None:
    write_gguf(make_peer(), tmp_path / "tiny.gguf", skip="blk.1.attn_k.weight")
    assert "blk.1.attn_k.weight" in refused(tmp_path / "tiny.gguf")


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(make_peer(), tmp_path / "tiny.gguf", architecture="mamba")
    assert "architecture mamba is not supported" in refused(tmp_path / "tiny.gguf")


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"")
    assert "neither config.json nor a .gguf file" in refused(tmp_path / "empty")
    assert "not a .gguf one" in refused(tmp_path / "model.bin")
    assert "no model at" in refused(tmp_path / "nowhere")
    assert "no model at" in refused("just-a-name")


def test_impossible_choices_are_refused_by_name(good_folder: Path) -> None:
    assert "backend nonsense is unknown" in refused(good_folder, backend="nonsense")
    assert "dtype=int3 is unknown" in refused(good_folder, dtype="int3")
    assert "dtype=bf16" in refused(good_folder, dtype="bf16", device="cpu")
    assert "device=tpu is unknown" in refused(good_folder, device="tpu")
    with pytest.raises(ConfigError, match="max_model_len=4096 exceeds the 128 tokens"):
        ModelRunner(str(good_folder), make_config(max_model_len=4096))
    with pytest.raises(ConfigError, match="max_adapters=2"):
        ModelRunner(str(good_folder), make_config(max_adapters=2))
    with pytest.raises(ConfigError, match="encoder_cache_size=8"):
        ModelRunner(str(good_folder), make_config(encoder_cache_size=8))


def test_a_folder_without_a_tokenizer_says_so(good_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(str(good_folder))


def test_blocks_fit_the_memory_they_are_planned_for(good_folder: Path) -> None:
    model = open_checkpoint(str(good_folder)).config
    runner = ModelRunner(str(good_folder), make_config(num_kv_blocks=7), dtype="fp32")
    num_bytes = sum(cache.numel() * cache.element_size() for cache in runner.kv_caches)
    assert num_bytes == 7 * runner.info.bytes_per_block
    assert num_blocks_for(num_bytes, model, 16, torch.float32) == 7
    assert num_blocks_for(num_bytes - 1, model, 16, torch.float32) == 6
    with pytest.raises(ConfigError, match="holds 1 blocks of 8192 bytes"):
        num_blocks_for(12000, model, 16, torch.float32)


def test_a_hub_id_out_of_reach_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    message = refused("owner/name")
    assert "owner/name" in message and "the hub" in message and "give a folder" in message
