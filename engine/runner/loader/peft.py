"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, checked against the model.

What can't be computed exactly as PEFT does is refused by name here; computing is in `models/lora.py`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.loader.safetensors import open_safetensors, read_json, read_tensor
from schedtop.engine.runner.models.config import ModelConfig

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias", "init_lora_weights"),
}
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("lora_dropout", "runtime_config", "megatron_core", "qalora_group_size", "eva_config", "ensure_weight_tying"),
}
"""Settings without effect on what a trained adapter computes. Any other one must be absent or off."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to start training that leave the model's own weights alone."""


@dataclass(frozen=True)
class LoraPair:
    """One module's change: x -> x A^T B^T, the scale already in B."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank]"""


@dataclass(frozen=True)
class LoraAdapter:
    """One adapter's changes by module, such as `model.layers.0.self_attn.q_proj`."""

    name: str
    pairs: Mapping[str, LoraPair]


def load_adapter(name: str, path: Path, model: ModelConfig) -> LoraAdapter:
    """Read an adapter for a model. Raises `ConfigError` naming what is missing, unsupported or of another shape."""
    if not path.is_dir():
        raise ConfigError(f"adapter {name}: no folder at {path}; give one with adapter_config.json and {WEIGHTS}")
    config = read_json(path / "adapter_config.json")
    _refuse_unsupported(config, f"adapter {name} ({path / 'adapter_config.json'})")
    targets = dict(_targets(config, model))
    if not targets:
        raise ConfigError(f"adapter {name}: target_modules={config.get('target_modules')} fits no module of the model")
    _refuse_unknown_targets(name, config, targets)
    if not (path / WEIGHTS).is_file():
        raise ConfigError(f"adapter {name}: {path} has no {WEIGHTS}: save it as safetensors, pickles aren't loaded")
    file = open_safetensors(path / WEIGHTS)
    wanted = {f"{PREFIX}{module}.lora_{side}.weight" for module in targets for side in "AB"}
    if unknown := sorted(set(file.keys()) - wanted):
        raise ConfigError(
            f"adapter {name}: tensor {unknown[0]} in {path / WEIGHTS} isn't supported: {_why(unknown[0])}"
        )
    if missing := sorted(wanted - set(file.keys())):
        raise ConfigError(f"adapter {name}: {path / WEIGHTS} lacks the tensor {missing[0]}")
    pairs = {module: _pair(name, file, module, shape, config) for module, shape in targets.items()}
    return LoraAdapter(name, pairs)


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: peft_type={config.get('peft_type')} is not supported; LORA is")
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), (int, float)):
        raise ConfigError(f"{where} lacks r or lora_alpha, or they are no numbers")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{where}: bias={config['bias']} is not supported; none is")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ConfigError(
            f"{where}: init_lora_weights={start} changes the model's own weights; convert it to a plain LoRA"
        )
    for key, value in config.items():
        if value and key not in _READ and key not in _HARMLESS:
            raise ConfigError(f"{where}: {key}={value} is not supported; only plain LoRA is")


def _modules(model: ModelConfig) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """Layer, full name and (out, in) sizes of everything an adapter may change."""
    for layer in range(model.num_layers):
        for product in model.products:
            for part, rows in product.parts:
                yield layer, f"model.layers.{layer}.{part}", (rows, product.width)


def _targets(config: Mapping[str, Any], model: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """The modules this adapter changes, by PEFT's rules of matching."""
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for layer, name, shape in _modules(model):
        is_excluded = _matches(config.get("exclude_modules"), name)
        if _matches(config.get("target_modules"), name) and not is_excluded and (not layers or layer in layers):
            yield name, shape


def _matches(wanted: str | list[str] | None, module: str) -> bool:
    if wanted == "all-linear":
        return True
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in wanted or ())


def _refuse_unknown_targets(name: str, config: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """A target that fits none of our modules: embeddings, the head, a module of another architecture."""
    wanted = config["target_modules"]
    for target in () if isinstance(wanted, str) else wanted:
        if not any(_matches([target], module) for module in targets) and not _matches(
            config.get("exclude_modules"), target
        ):
            known = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
            raise ConfigError(f"adapter {name}: target module {target} is not supported; supported are {known}")


def _why(tensor: str) -> str:
    kinds = {
        "lora_magnitude_vector": "it belongs to DoRA",
        "lora_embedding": "it changes the embeddings",
        ".bias": "it is a bias",
        ".lora_": "no module of the model that target_modules names has it",
    }
    return next((why for part, why in kinds.items() if part in tensor), "it replaces a module (modules_to_save)")


def _pair(name: str, file: Any, module: str, shape: tuple[int, int], config: Mapping[str, Any]) -> LoraPair:
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    a = _take(name, file, f"{PREFIX}{module}.lora_A.weight", (int(rank), shape[1]))
    b = _take(name, file, f"{PREFIX}{module}.lora_B.weight", (shape[0], int(rank)))
    return LoraPair(a, b * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _take(name: str, file: Any, tensor: str, shape: tuple[int, int]) -> torch.Tensor:
    found = read_tensor(file, tensor, f"adapter {name}")
    if tuple(found.shape) != shape:
        raise ConfigError(
            f"adapter {name}: tensor {tensor} has shape {list(found.shape)}, the model and the rank ask for "
            f"{list(shape)}"
        )
    return found.to(torch.float32)
