"""A model's shape, read from `config.json` or GGUF metadata, never assumed. Torch-free: memory plans use it too.

How the weights are computed with is in `llama.py`; where they come from, in `loader/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.loader.gguf import GgufFile

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for stretched contexts, how frequencies are scaled."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class Product:
    """Modules of a layer that share their input: computed as one product, their outputs side by side."""

    parts: tuple[tuple[str, int], ...]
    """Module within the layer, such as `self_attn.q_proj`, and its output size."""
    width: int
    """Size of the input."""
    has_bias: bool = False

    @property
    def rows(self) -> int:
        """Size of the output."""
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a Llama-like decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_eps: float
    max_context: int
    """Longest context the model was made for, in tokens."""
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window per layer in tokens; None = full attention."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.head_size % 2:
            raise ConfigError(f"a head size of {self.head_size} is odd: rotary embeddings need an even one")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads can't share {self.num_kv_heads} KV heads: not a whole number each"
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_size

    @property
    def products(self) -> tuple[Product, Product, Product, Product]:
        """A layer's products in their order: q, k and v; attention output; gate and up; down."""
        hidden, inner = self.hidden_size, self.intermediate_size
        qkv = (("q_proj", self.q_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size))
        return (
            Product(tuple((f"self_attn.{name}", rows) for name, rows in qkv), hidden, self.qkv_bias),
            Product((("self_attn.o_proj", hidden),), self.q_size, self.output_bias),
            Product((("mlp.gate_proj", inner), ("mlp.up_proj", inner)), hidden, self.mlp_bias),
            Product((("mlp.down_proj", hidden),), inner, self.mlp_bias),
        )

    @property
    def num_parameters(self) -> int:
        """Weights a token passes through, embeddings counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * sum(product.rows * product.width for product in self.products) + embeddings

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of KV cache one token needs over all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value


def config_from_json(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """From a Hugging Face `config.json`. Raises `ConfigError` naming the unsupported or missing part."""
    family = _family(raw, where)

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ConfigError(f"{where} lacks {key}: it can't be served")
        return raw[key]

    def size(key: str, default: int | None = None) -> int:
        return _checked_size(need(key) if default is None else raw.get(key) or default, key, where)

    _refuse_unsupported(raw, where)
    hidden, num_heads, num_layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    max_context = size("max_position_embeddings")
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_size=size("head_dim", hidden // num_heads),
        rms_eps=_checked_number(need("rms_norm_eps"), "rms_norm_eps", where),
        max_context=max_context,
        rope=_rope_from_json(raw, max_context, where),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, num_layers, where),
        eos_token_ids=_ids(raw.get("eos_token_id")),
    )


def _checked_size(value: Any, key: str, where: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key}={value!r} must be a whole number above 0")
    return value


def _checked_number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{where}: {key}={value!r} must be a number above 0")
    return float(value)


def _family(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and raw.get("model_type") in FAMILIES:
        return str(raw["model_type"])
    found = ", ".join(names) or raw.get("model_type", "none named")
    raise ConfigError(f"{where}: architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"{where}: hidden_act={raw['hidden_act']} is not supported; silu is")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(f"{where}: weights quantised by {method} are not supported; give plain safetensors or GGUF")


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _rope_from_json(raw: Mapping[str, Any], max_context: int, where: str) -> RopeConfig:
    """Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with both."""
    scaling: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{where}: RoPE scaling {kind} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if float(raw.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError(f"{where}: partial rotary embeddings are not supported")

    def number(key: str, default: float) -> float:
        return _checked_number(scaling.get(key, default), key, where)

    return RopeConfig(
        theta=_checked_number(theta, "rope_theta", where),
        kind=kind,
        factor=number("factor", 1.0),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        original_context=int(number("original_max_position_embeddings", max_context)),
    )


def _windows(raw: Mapping[str, Any], family: str, num_layers: int, where: str) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is None or (family != "mistral" and not raw.get("use_sliding_window", False)):
        return (None,) * num_layers
    _checked_size(window, "sliding_window", where)
    if kinds := raw.get("layer_types"):
        if len(kinds) != num_layers:
            raise ConfigError(f"{where}: layer_types has {len(kinds)} entries for {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = 0 if family == "mistral" else raw.get("max_window_layers", num_layers)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """From GGUF metadata. Raises `ConfigError` naming the unsupported or missing part."""
    family = str(file.need("general.architecture"))
    if family not in ("llama", "qwen2", "qwen3"):
        raise ConfigError(f"{file.path}: architecture {family} is not supported; supported are llama, qwen2, qwen3")

    def size(key: str, default: int | None = None) -> int:
        name = f"{family}.{key}"
        value = file.need(name) if default is None else file.get(name) or default
        return _checked_size(value, name, str(file.path))

    hidden, num_heads = size("embedding_length"), size("attention.head_count")
    head_size = size("attention.key_length", hidden // num_heads)
    num_layers, max_context = size("block_count"), size("context_length")
    if (rotated := file.get(f"{family}.rope.dimension_count", head_size)) != head_size:
        raise ConfigError(f"{file.path}: rotary embeddings of {rotated} of {head_size} dimensions are not supported")
    window = file.get(f"{family}.attention.sliding_window")
    names = set(file.tensor_names)
    return ModelConfig(
        family=family,
        vocab_size=file.get(f"{family}.vocab_size") or len(file.need("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_size=head_size,
        rms_eps=_checked_number(
            file.need(f"{family}.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon", str(file.path)
        ),
        max_context=max_context,
        rope=_rope_from_gguf(file, family, max_context),
        tied_embeddings="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        windows=(window or None,) * num_layers,
    )


def _rope_from_gguf(file: GgufFile, family: str, max_context: int) -> RopeConfig:
    """Llama 3 scaling isn't in the metadata: it comes as a tensor of factors, which the checkpoint applies."""
    kind = file.get(f"{family}.rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise ConfigError(f"{file.path}: RoPE scaling {kind} is not supported; none, linear and factor tensors are")
    return RopeConfig(
        theta=float(file.get(f"{family}.rope.freq_base") or 10000.0),
        kind="linear" if kind == "linear" else "default",
        factor=float(file.get(f"{family}.rope.scaling.factor") or 1.0),
        original_context=max_context,
    )
