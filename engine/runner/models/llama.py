"""The Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2): one flat batch in, hidden states or logits out.

Attention goes through the seam in `kernels/attention.py`; nothing here knows of requests.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from schedtop.engine.runner.loader.checkpoint import Checkpoint
from schedtop.engine.runner.models.linear import Linear, MakeLinear, fuse, fuse_biases
from schedtop.engine.runner.models.lora import Adapters
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

    `make_linear` packs a weight and its bias; norms and embeddings stay in `dtype`. `adapters` says before each forward
    pass which rows it changes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        attention: AttentionBackend,
        make_linear: MakeLinear,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        adapters: Adapters | None = None,
    ) -> None:
        self.config = checkpoint.config
        self._attention = attention
        self._checkpoint = checkpoint
        self._make = make_linear
        self._device, self._dtype = device, dtype
        self._adapters = adapters or Adapters([], device, dtype)
        config = self.config
        self._embeddings = self._take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._build_layer(index) for index in range(config.num_layers)]
        self._norm = self._take("model.norm.weight", config.hidden_size)
        self._head = make_linear(self._head_weight(), None)
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

    # ---- building -------------------------------------------------------------------------------------------

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.take(name, shape).to(self._device, self._dtype)

    def _head_weight(self) -> torch.Tensor:
        if self.config.tied_embeddings:
            return self._embeddings
        return self._take("lm_head.weight", self.config.vocab_size, self.config.hidden_size)

    def _build_layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_size
        qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return _Layer(
            input_norm=self._take(prefix + "input_layernorm.weight", hidden),
            qkv=self._fused(attention, qkv, hidden, config.qkv_bias),
            q_norm=self._take(attention + "q_norm.weight", head) if config.qk_norm else None,
            k_norm=self._take(attention + "k_norm.weight", head) if config.qk_norm else None,
            output=self._fused(attention, [("o_proj", hidden)], config.q_size, config.output_bias),
            mlp_norm=self._take(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._fused(mlp, gate_up, hidden, config.mlp_bias),
            down=self._fused(mlp, [("down_proj", hidden)], inner, config.mlp_bias),
            window=config.windows[index],
        )

    def _fused(self, prefix: str, parts: list[tuple[str, int]], width: int, has_bias: bool) -> Linear:
        """One product for all parts that share their input of `width`."""
        weights = [self._take(f"{prefix}{name}.weight", rows, width) for name, rows in parts]
        biases = [self._take(f"{prefix}{name}.bias", rows) for name, rows in parts] if has_bias else None
        product = self._make(fuse(weights), fuse_biases(biases))
        return self._adapters.extend(product, [(f"{prefix}{name}", rows) for name, rows in parts])
