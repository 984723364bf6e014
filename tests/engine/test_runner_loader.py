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


def write_gguf(
    peer: Any,
    path: Path,
    quant: Quant = Quant.F32,
    skip: str = "",
    architecture: str = "",
    num_heads: int | None = None,
    rope_factors: np.ndarray | None = None,
) -> None:
    """Write a peer's weights, matrices in `quant`, and give the peer the values as they are in the file."""
    config = peer.config
    family = architecture or config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads if num_heads is None else num_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
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
        is_random = kind in K_QUANTS  # the library can't make these
        packed = random_blocks(kind, *values.shape) if is_random else gguf.quantize(np.ascontiguousarray(stored), kind)
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
        *[("llama", quant) for quant in (Quant.Q4_K, Quant.Q6_K)],
        ("qwen2", Quant.Q8_0),
        ("qwen3", Quant.F16),
    ],
    ids=str,
)
def test_gguf_logits_equal_those_of_transformers(tmp_path: Path, family: str, quant: Quant) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512} if quant in K_QUANTS else {}  # whole blocks of 256
    peer = make_peer(family, **sizes)
    write_gguf(peer, tmp_path / "tiny.gguf", quant)
    prompt = list(range(5, 30))
    with torch.inference_mode():
        expected = peer(input_ids=torch.tensor([prompt])).logits[0]
    found = logits_of(ModelRunner(str(tmp_path / "tiny.gguf"), make_config(), dtype="fp32"), prompt)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_gguf_files_with_a_stretched_context_equal_transformers(tmp_path: Path, kind: str) -> None:
    """Converters write Llama 3's scaling as a tensor of divisors: plain frequencies over transformers' own."""
    peer = make_peer(rope_parameters=ROPES[kind])
    plain = 1.0 / ROPES[kind]["rope_theta"] ** (torch.arange(0, 16, 2).float() / 16)
    factors = (plain / peer.model.rotary_emb.inv_freq).numpy() if kind == "llama3" else None
    write_gguf(peer, tmp_path / "tiny.gguf", rope_factors=factors)
    prompt = list(range(5, 35))
    with torch.inference_mode():
        expected = peer(input_ids=torch.tensor([prompt])).logits[0]
    found = logits_of(ModelRunner(str(tmp_path / "tiny.gguf"), make_config(), dtype="fp32"), prompt)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def half(raw: np.ndarray) -> float:
    return float(raw.view(np.float16)[0])


def q4_k_value(block: np.ndarray, index: int) -> float:
    """By the format: d, m, then eight 6-bit scales and minima in 12 bytes, then nibbles, 64 values in 32 bytes."""
    packed, j = block[4:16].astype(int), index // 32
    if j < 4:
        scale, minimum = packed[j] & 63, packed[j + 4] & 63
    else:
        scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
        minimum = packed[j + 4] >> 4 | packed[j] >> 6 << 4
    byte = int(block[16 + index // 64 * 32 + index % 32])
    nibble = byte >> 4 if index % 64 >= 32 else byte & 15
    return half(block[:2]) * scale * nibble - half(block[2:4]) * minimum


def q6_k_value(block: np.ndarray, index: int) -> float:
    """By the format: low nibbles (128 bytes), high pairs of bits (64), sixteen int8 scales, then d."""
    part, within = divmod(index, 128)
    quarter, place = divmod(within, 32)
    byte = int(block[part * 64 + place + quarter % 2 * 32])
    low = byte >> 4 if quarter >= 2 else byte & 15
    high = int(block[128 + part * 32 + place]) >> 2 * quarter & 3
    return half(block[208:210]) * int(block[192:208].view(np.int8)[index // 16]) * ((low | high << 4) - 32)


K_QUANTS = {Quant.Q4_K: (q4_k_value, [0, 2]), Quant.Q6_K: (q6_k_value, [208])}
"""How a value is read, and where a block's fp16 factors lie."""


def random_blocks(quant: Quant, num_rows: int, width: int) -> np.ndarray:
    """Rows of blocks with every bit at random, but for their factors: those give values of a weight's size."""
    block, size = gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(num_rows + width)
    raw = rng.integers(0, 256, (num_rows * width // block, size), dtype=np.uint8)
    for at in K_QUANTS[quant][1]:
        raw[:, at : at + 2] = rng.uniform(1e-4, 4e-4, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(num_rows, -1)


@pytest.mark.parametrize("quant", K_QUANTS, ids=str)
def test_k_quants_have_the_values_that_their_format_says(tmp_path: Path, quant: Quant) -> None:
    read, _ = K_QUANTS[quant]
    raw = random_blocks(quant, 3, 512)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "k.gguf").tensor("token_embd.weight")
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[quant][1])
    expected = np.array([[read(block, index) for index in range(256)] for block in blocks]).reshape(3, 512)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    assert np.unique(found).size > 500


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
    "size in words": (lambda f: edit_config(f, num_hidden_layers="2"), ["num_hidden_layers='2'", "above 0"]),
    "no heads": (lambda f: edit_config(f, num_attention_heads=-4), ["num_attention_heads=-4"]),
    "odd heads": (lambda f: edit_config(f, head_dim=15), ["head size of 15"]),
    "no epsilon": (lambda f: edit_config(f, rms_norm_eps=0), ["rms_norm_eps=0"]),
    "rope base": (lambda f: edit_config(f, rope_parameters={"rope_type": "default", "rope_theta": -1}), ["theta=-1"]),
    "rope in part": (lambda f: edit_config(f, partial_rotary_factor=0.5), ["partial rotary"]),
    "layer kinds": (
        lambda f: edit_config(
            f, architectures=["MistralForCausalLM"], sliding_window=8, layer_types=["full_attention"] * 3
        ),
        ["layer_types has 3 entries for 2 layers"],
    ),
    "no object": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "isn't a JSON object"]),
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


@pytest.mark.parametrize("share", [0.002, 0.05, 0.3, 0.7])
def test_a_gguf_file_that_ends_anywhere_is_refused(tmp_path: Path, share: float) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(make_peer(), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert "tiny.gguf" in refused(file)


def test_a_gguf_file_with_a_size_that_makes_no_sense_names_it(tmp_path: Path) -> None:
    write_gguf(make_peer(), tmp_path / "tiny.gguf", num_heads=0)
    assert "llama.attention.head_count=0" in refused(tmp_path / "tiny.gguf")


def test_a_gguf_tensor_of_a_type_that_is_not_read_names_it(tmp_path: Path) -> None:
    write_gguf(make_peer(), tmp_path / "tiny.gguf", Quant.Q5_0)
    message = refused(tmp_path / "tiny.gguf")
    assert "token_embd.weight is of type Q5_0" in message and "Q4_K, Q6_K" in message


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
