"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2): one flat batch in, hidden states or logits out.

Attention goes through the seam in `kernels/attention.py`; nothing here knows of requests.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from schedtop.engine.runner.loader.checkpoint import Checkpoint
from schedtop.engine.runner.models.config import Product
from schedtop.engine.runner.models.linear import Linear, MakeLinear, fuse, fuse_biases
from schedtop.engine.runner.models.lora import AdapterBuilder
from schedtop.engine.runner.models.rope import RopeTable, rope_frequencies, rotate
from schedtop.kernels.attention import AttentionBackend, AttentionMeta


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class LlamaModel:
    """Weights of one model, ready to compute with.

    `make_linear` packs a weight and its bias; norms and embeddings stay in `dtype`. `adapters` puts theirs beside
    the products. The checkpoint isn't kept.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        attention: AttentionBackend,
        make_linear: MakeLinear,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        adapters: AdapterBuilder | None = None,
    ) -> None:
        self.config = config = checkpoint.config
        self._attention = attention
        weights = _Weights(checkpoint, make_linear, device, dtype, adapters)
        self._embeddings = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [weights.layer(index) for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        self._head = make_linear(weights.head(self._embeddings), None)
        frequencies = rope_frequencies(config.rope, config.head_size, checkpoint.rope_factors())
        self._rope = RopeTable(frequencies, max_positions).to(device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor], meta: AttentionMeta
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of a flat batch; writes its keys and values to the caches."""
        rotation = self._rope.at(positions)
        hidden = self._embeddings[token_ids]
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden += self._attend(layer, self._normed(hidden, layer.input_norm), rotation, kv_cache, meta)
            hidden += self._mlp(layer, self._normed(hidden, layer.mlp_norm))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [num_rows, vocab_size] of chosen rows of hidden states."""
        return self._head(self._normed(hidden, self._norm)).float()

    def _attend(
        self,
        layer: _Layer,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        meta: AttentionMeta,
    ) -> torch.Tensor:
        config = self.config
        heads = layer.qkv(x).view(len(x), -1, config.head_size)
        q_and_k, v = torch.split(heads, [config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = torch.split(q_and_k, [config.num_heads, config.num_kv_heads], dim=1)
            q_and_k = torch.cat((self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)), dim=1)
        rotated = rotate(q_and_k, *rotation)
        q, k = torch.split(rotated, [config.num_heads, config.num_kv_heads], dim=1)
        attended = self._attention.attend(q, k, v, kv_cache, meta, layer.window)
        return layer.output(attended.flatten(1))

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_eps)


class _Weights:
    """Takes tensors out of a checkpoint and packs them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        make_linear: MakeLinear,
        device: torch.device,
        dtype: torch.dtype,
        adapters: AdapterBuilder | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._make = make_linear
        self._device, self._dtype = device, dtype
        self._adapters = adapters

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor as it is computed with."""
        return self._checkpoint.take(name, shape).to(self._device, self._dtype)

    def head(self, embeddings: torch.Tensor) -> torch.Tensor:
        """What makes logits of hidden states; may be the embeddings themselves."""
        if self._config.tied_embeddings:
            return embeddings
        return self.take("lm_head.weight", self._config.vocab_size, self._config.hidden_size)

    def layer(self, index: int) -> _Layer:
        """All of one layer."""
        config, prefix = self._config, f"model.layers.{index}."
        qkv, output, gate_up, down = (self._packed(prefix, product) for product in config.products)
        q_norm, k_norm = (
            self.take(f"{prefix}self_attn.{name}.weight", config.head_size) if config.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        return _Layer(
            input_norm=self.take(prefix + "input_layernorm.weight", config.hidden_size),
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            output=output,
            mlp_norm=self.take(prefix + "post_attention_layernorm.weight", config.hidden_size),
            gate_up=gate_up,
            down=down,
            window=config.windows[index],
        )

    def _packed(self, prefix: str, product: Product) -> Linear:
        modules = [(prefix + part, rows) for part, rows in product.parts]
        weights = [self.take(f"{name}.weight", rows, product.width) for name, rows in modules]
        biases = [self.take(f"{name}.bias", rows) for name, rows in modules] if product.has_bias else None
        made = self._make(fuse(weights), fuse_biases(biases))
        return made if self._adapters is None else self._adapters.extend(made, modules)
