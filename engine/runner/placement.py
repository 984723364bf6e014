"""Where and how a model is computed: device, precision, attention backend; chosen at start, with the reasons told.

Impossible combinations are refused by name here, before anything is allocated. Also the memory plan of the KV cache.
"""

import os
from dataclasses import dataclass

import torch

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.loader.checkpoint import Checkpoint
from schedtop.engine.runner.models.config import ModelConfig
from schedtop.engine.runner.models.linear import DenseLinear, HalfWeightLinear, MakeLinear, why_no_half_weight_linear
from schedtop.kernels.attention import AttentionBackend, AttentionSpec
from schedtop.kernels.select import choose_backend

DTYPES = ("auto", "fp16", "fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class RunnerInfo:
    """What was chosen, and what the model's file says: for the start-up log, the door and `--explain-memory`."""

    backend: str
    """Attention backend and the reason for it, in words."""
    device: str
    dtype: str
    """Precision of weights and KV cache, and the reason for it, in words."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    """Longest context the model was made for, in tokens."""
    bytes_per_block: int
    """KV bytes of one block over all layers."""
    num_parameters: int
    weight_bytes: int


@dataclass(frozen=True)
class Placement:
    """The choices a runner is built from."""

    device: torch.device
    compute_dtype: torch.dtype
    cache_dtype: torch.dtype
    make_linear: MakeLinear
    attention: AttentionBackend
    backend_reason: str
    dtype_reason: str

    @property
    def packs_half(self) -> bool:
        """Whether products hold fp16 weights whatever the compute dtype is."""
        return self.make_linear is HalfWeightLinear

    def info(self, checkpoint: Checkpoint, config: EngineConfig) -> RunnerInfo:
        """The choices in words, beside the model's own limits."""
        model = checkpoint.config
        is_half = self.cache_dtype is not torch.float32
        return RunnerInfo(
            backend=f"{self.attention.name} ({self.backend_reason})",
            device=str(self.device),
            dtype=self.dtype_reason,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            bytes_per_block=bytes_per_block(model, config.block_size, self.cache_dtype),
            num_parameters=model.num_parameters,
            weight_bytes=model.num_parameters * (2 if is_half else 4),
        )


def bytes_per_block(model: ModelConfig, block_size: int, cache_dtype: torch.dtype) -> int:
    """KV bytes of one block over all layers."""
    return model.kv_bytes_per_token(cache_dtype.itemsize) * block_size


def num_blocks_for(memory_bytes: int, model: ModelConfig, block_size: int, cache_dtype: torch.dtype) -> int:
    """KV blocks that fit into a memory budget. Raises `ConfigError` if not even two do (one may be reserved)."""
    size = bytes_per_block(model, block_size, cache_dtype)
    count = memory_bytes // size
    if count < 2:
        raise ConfigError(
            f"a KV memory of {memory_bytes} bytes holds {count} blocks of {size} bytes: give at least {2 * size} bytes"
        )
    return count


def check_kv_memory(num_blocks: int, model: ModelConfig, block_size: int, placement: Placement) -> None:
    """Raise `ConfigError` for more KV blocks than the device has memory for, weights not even counted."""
    size = bytes_per_block(model, block_size, placement.cache_dtype)
    memory = _device_memory(placement.device)
    if num_blocks * size > memory:
        raise ConfigError(
            f"{num_blocks} KV blocks of {block_size} tokens need {num_blocks * size / 2**30:,.1f} GiB, "
            f"{placement.device} has {memory / 2**30:,.1f} GiB: give at most {memory // size} with num_kv_blocks, "
            "or say with kv_memory how much to use"
        )


def _device_memory(device: torch.device) -> int:
    """Bytes the device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def choose_placement(
    model: ModelConfig, block_size: int, *, dtype: str = "auto", backend: str = "auto", device: str = "auto"
) -> Placement:
    """Choose device, precision and backend. Raises `ConfigError` for what can't work, naming it."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} is unknown: choose from {', '.join(DTYPES)}")
    where = _choose_device(device)
    compute, cache, make_linear, reason = _choose_dtype(dtype, where)
    spec = AttentionSpec(
        device=where.type,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        block_size=block_size,
        cache_dtype=cache,
        has_window=any(model.windows),
    )
    try:
        attention, why = choose_backend(spec, backend)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Placement(where, compute, cache, make_linear, attention, why, reason)


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={device}: this torch sees no CUDA device; use --device cpu")
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device={device} is unknown: choose from auto, cpu, cuda")
    return torch.device(device)


def _choose_dtype(dtype: str, device: torch.device) -> tuple[torch.dtype, torch.dtype, MakeLinear, str]:
    """(compute dtype, cache dtype, how products are made, reason)."""
    if device.type == "cuda":
        kinds = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return kinds[dtype], kinds[dtype], DenseLinear, f"{str(kinds[dtype])[6:]} weights and KV on CUDA"
    if dtype == "bf16":
        raise ConfigError("dtype=bf16 is unusably slow on this CPU path: choose fp16 or fp32")
    if dtype == "fp32":
        return torch.float32, torch.float32, DenseLinear, "fp32 throughout: asked for"
    obstacle = why_no_half_weight_linear()
    if obstacle is None:
        how = "found by a probe" if dtype == "auto" else "asked for"
        return torch.float32, torch.float16, HalfWeightLinear, f"fp16 weights through fbgemm, fp16 KV: {how}"
    if dtype == "fp16":
        raise ConfigError(f"dtype=fp16 can't be had: {obstacle}; choose fp32")
    return torch.float32, torch.float32, DenseLinear, f"fp32 throughout: {obstacle}"
