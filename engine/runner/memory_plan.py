"""What an engine will hold in memory, worked out from sizes alone before anything is allocated.

Used by `schedtop serve --explain-memory`. Nothing is allocated or loaded here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schedtop.engine.config import EngineConfig
from schedtop.engine.runner.loader.peft import LoraAdapter
from schedtop.engine.runner.models.config import ModelConfig
from schedtop.engine.runner.models.linear import HalfWeightLinear
from schedtop.engine.runner.placement import Placement, bytes_per_block

INDEX_BYTES = 4
"""Token ids and block tables are int32."""


@dataclass(frozen=True)
class MemoryPart:
    """One use of memory, in bytes, with the sizes it comes from in words."""

    name: str
    num_bytes: int
    because: str = ""


def plan_memory(
    model: ModelConfig, config: EngineConfig, placement: Placement, adapters: Sequence[LoraAdapter] = ()
) -> list[MemoryPart]:
    """Everything that lasts, and the largest step's passing values, which are an estimate."""
    max_positions = (config.max_model_len or model.max_context) + config.max_num_speculative_tokens + 1
    block = bytes_per_block(model, config.block_size, placement.cache_dtype)
    rows, tokens = config.max_num_seqs * (config.max_num_speculative_tokens + 1), config.max_num_batched_tokens
    parts = [
        MemoryPart("weights", _weight_bytes(model, placement), f"{model.num_parameters:,} parameters"),
        MemoryPart(
            "KV cache",
            config.num_kv_blocks * block,
            f"{config.num_kv_blocks:,} blocks of {config.block_size} tokens, {block:,} bytes each",
        ),
        MemoryPart(
            "tables",
            _table_bytes(model, config, max_positions),
            f"rotary embeddings and token rows of {max_positions:,} positions",
        ),
        MemoryPart(
            "largest step",
            _step_bytes(model, placement, tokens, rows),
            f"{tokens:,} tokens, {rows:,} rows of {model.vocab_size:,} logits; while it runs",
        ),
    ]
    if adapters:
        size = sum(_changed_values(model, adapter) for adapter in adapters) * placement.compute_dtype.itemsize
        parts.insert(1, MemoryPart("adapters", size, ", ".join(adapter.name for adapter in adapters)))
    return parts


def _weight_bytes(model: ModelConfig, placement: Placement) -> int:
    """Products as they are packed; embeddings and norms in the compute dtype."""
    value = placement.compute_dtype.itemsize

    def packed(rows: int, width: int) -> int:
        return HalfWeightLinear.num_bytes(rows, width) if placement.packs_half else rows * width * value

    embeddings = model.vocab_size * model.hidden_size * value
    is_shared = model.tied_embeddings and not placement.packs_half
    head = 0 if is_shared else packed(model.vocab_size, model.hidden_size)
    products = sum(packed(product.rows, product.width) for product in model.products)
    biases = sum(product.rows for product in model.products if product.has_bias) * value
    norms = (2 * model.hidden_size + 2 * model.head_size * model.qk_norm) * value
    return model.num_layers * (products + biases + norms) + embeddings + head + model.hidden_size * value


def _table_bytes(model: ModelConfig, config: EngineConfig, max_positions: int) -> int:
    """Cosines and sines, and per running request its tokens and blocks."""
    rotary = 2 * 4 * max_positions * (model.head_size // 2)
    blocks = -(-max_positions // config.block_size)
    return rotary + config.max_num_seqs * INDEX_BYTES * (max_positions + blocks)


def _step_bytes(model: ModelConfig, placement: Placement, tokens: int, rows: int) -> int:
    """At the widest point of a layer, or at the logits with the copies that sampling makes."""
    heads = model.q_size + model.kv_size
    attention = 2 * model.hidden_size + 3 * heads + model.kv_size + model.q_size
    mlp = 3 * model.hidden_size + 3 * model.intermediate_size
    logits = rows * model.vocab_size * 4 * 3
    return max(tokens * max(attention, mlp) * placement.compute_dtype.itemsize, logits)


def _changed_values(model: ModelConfig, adapter: LoraAdapter) -> int:
    """Values an adapter takes beside each product it changes: A's one above the other, B's in a block diagonal."""
    count = 0
    for layer in range(model.num_layers):
        for product in model.products:
            names = [f"model.layers.{layer}.{part}" for part, _ in product.parts]
            rank = sum(len(adapter.pairs[name].a) for name in names if name in adapter.pairs)
            count += rank * (product.width + product.rows)
    return count
