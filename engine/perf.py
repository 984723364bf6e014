"""What a step cost the machine, by model arithmetic: floating-point operations and bytes moved, beside its times.

Counts what must happen, not what a kernel does: two operations per multiply-add, weights and the KV in
use read once per step, new KV written once per token. Source of the counting: Kaplan et al. 2020, section 2.1, plus the
attention term.
"""

import msgspec

from schedtop.engine.snapshot import StepRecord


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-like model; bytes per element as stored."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    weight_bytes: int = 2
    kv_bytes: int = 2
    block_size: int = 16

    @property
    def weights_per_layer(self) -> int:
        """Weights of one layer's matrices: QKV, output projection, gate, up and down."""
        attention = self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache for one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.kv_bytes


class PerfStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step: its time in parts (seconds), its work, and the rates that follow."""

    step: int
    schedule_s: float
    forward_s: float
    update_s: float
    other_s: float
    """Hand-over, boundary calls, waiting for the step before."""
    flops: float
    bytes_moved: float

    @property
    def gflops_per_s(self) -> float:
        """Billions of floating-point operations per second of forward pass."""
        return self.flops / self.forward_s / 1e9 if self.forward_s > 0 else 0.0

    @property
    def gbytes_per_s(self) -> float:
        """Billions of bytes per second of forward pass."""
        return self.bytes_moved / self.forward_s / 1e9 if self.forward_s > 0 else 0.0


def perf_stats(shape: ModelShape, record: StepRecord) -> PerfStats:
    """The work of a finished step."""
    num_tokens = record.num_decode_tokens + record.num_prefill_tokens + record.num_draft_tokens
    matrices = shape.num_layers * shape.weights_per_layer
    head = shape.hidden_size * shape.vocab_size
    num_sampled = max(record.num_output_tokens, record.num_decode_tokens)
    attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_size * record.num_context_tokens
    num_read = min(record.num_context_tokens, record.blocks_in_use * shape.block_size)
    kv_read = num_read * shape.kv_bytes_per_token
    return PerfStats(
        step=record.step,
        schedule_s=record.schedule_s,
        forward_s=record.forward_s,
        update_s=record.update_s,
        other_s=max(0.0, record.duration_s - record.schedule_s - record.forward_s - record.update_s),
        flops=2.0 * num_tokens * matrices + 2.0 * num_sampled * head + attention,
        bytes_moved=(matrices + head) * shape.weight_bytes + kv_read + num_tokens * shape.kv_bytes_per_token,
    )
