"""Rotary position embedding in the half-split form, with the scalings of stretched contexts."""

import math

import torch

from schedtop.engine.runner.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_size: int, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Radians per position, fp32 [head_size / 2]. `factors` divide them (Llama 3 in GGUF)."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / rope.theta**exponents
    if factors is not None:
        frequencies = frequencies / factors
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    waves = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_context / waves - low) / (high - low)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class RopeTable:
    """Cosines and sines for every position, worked out once."""

    def __init__(self, frequencies: torch.Tensor, num_positions: int) -> None:
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None]
        self._cos = angles.cos()  # [num_positions, head_size / 2]
        self._sin = angles.sin()

    def to(self, device: torch.device) -> "RopeTable":
        """Move the table."""
        self._cos, self._sin = self._cos.to(device), self._sin.to(device)
        return self

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [num_tokens, 1, head_size / 2] of int64 `positions`."""
        return self._cos[positions][:, None], self._sin[positions][:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [num_tokens, num_heads, head_size] to their positions."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
