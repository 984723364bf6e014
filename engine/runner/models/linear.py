"""Matrix products of the model: fp32, or fp16 weights through fbgemm where torch has it."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[num_tokens, in_features] -> [num_tokens, out_features], both in the compute dtype."""
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]


class DenseLinear:
    """torch's own product, in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class HalfWeightLinear:
    """fp16 weights, fp32 activations and accumulation: fbgemm's packed product, CPU only."""

    PACKED_ROWS, PACKED_COLUMNS = 512, 16
    """fbgemm packs in blocks of so many inputs and outputs and fills the last ones up."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        torch.backends.quantized.engine = "fbgemm"
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)

    @classmethod
    def num_bytes(cls, out_features: int, in_features: int) -> int:
        """Memory of a packed weight."""
        return 2 * _filled_up(out_features, cls.PACKED_COLUMNS) * _filled_up(in_features, cls.PACKED_ROWS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product


def _filled_up(size: int, block: int) -> int:
    return -(-size // block) * block


def why_no_half_weight_linear() -> str | None:
    """Why fbgemm's fp16 products can't be used here; None = they work (a small one is tried)."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this torch has no fbgemm"
    weight, x = torch.eye(64), torch.ones(2, 64)
    try:
        is_right = torch.equal(HalfWeightLinear(weight)(x), x)
    except RuntimeError as error:
        return f"fbgemm fails here ({error})"
    return None if is_right else "fbgemm computes wrong results here"


def fuse(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Products that share their input become one, their outputs side by side."""
    return torch.cat(list(weights))


def fuse_biases(biases: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
    """The biases belonging to `fuse`."""
    return None if biases is None else torch.cat(list(biases))
