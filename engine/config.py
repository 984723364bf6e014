"""What an engine is started with: sizes of what is allocated, hence the ceilings of the live knobs.

Nothing here changes while the engine runs. What can change lives in `knobs.py`.
"""

import msgspec

from schedtop.engine.errors import ConfigError

MAX_BLOCK_SIZE = 1 << 16
MAX_KV_BLOCKS = 10_000_000
"""The book-keeping of so many takes gigabytes by itself; a model's KV memory ends long before."""
MAX_BATCHED_TOKENS = 1 << 24


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start-up sizes and the named settings in which scheduler profiles differ.

    Raises `ConfigError` when sizes don't fit together.
    """

    name: str = "schedtop"
    """Engine name: the socket's file name and the label in metrics."""
    model: str = "fake"
    """Name of the served model, as `/v1/models` and the `model_name` label show it."""

    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int = 1000
    """KV blocks allocated, the null block included where there is one."""
    null_block: bool = True
    """Block 0 is never handed out (vLLM pads its block tables with it)."""
    max_model_len: int | None = 4096
    """Longest context (prompt + output) in tokens; None = no limit."""
    max_num_batched_tokens: int = 2048
    """Tokens the runner's buffers hold: ceiling of the live token budget."""
    max_num_seqs: int = 64
    """Sequence slots the runner allocates: ceiling of the live cap on running requests."""
    max_num_speculative_tokens: int = 0
    """Most draft tokens per request and step: ceiling of `num_speculative_tokens`."""
    watermark_counts_null_block: bool = True
    """Watermark blocks = int(watermark x num_kv_blocks) as vLLM; False: of the usable blocks."""
    async_depth: int = 2
    """Steps in flight at most while `async_scheduling` is on."""
    encoder_cache_size: int = 0
    """Embeddings the encoder cache holds (multimodal inputs); 0 = no encoder."""
    max_num_encoder_tokens: int = 0
    """Embeddings the encoder may compute in one step."""
    max_adapters: int = 0
    """Adapter (LoRA) slots: different adapters among the requests of one step; 0 = no adapters."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that requests may ask for; none given = any name, where the runner has no weights."""
    repetition_max_pattern: int = 0
    """Longest token pattern looked for by the repetition stop; 0 = off."""
    repetition_min_count: int = 0
    """How often a pattern must repeat in a row to stop a request."""
    pads_drafts: bool = True
    """A request that joins with one token beside decodes with drafts gets placeholder drafts, as in vLLM."""
    padding_may_block: bool = False
    """A request is kept out by placeholder drafts that the whole budget or pool can't hold, for ever, as in vLLM."""
    unhashes_withdrawn: bool = True
    """Forget hashes of blocks planned but withdrawn before they were computed (vLLM keeps them)."""
    readmits_when_paused: bool = True
    """While a pause admits nobody new, re-admit preempted requests, so that a drain ends (vLLM does not)."""
    defers_block_free: bool = False
    """Reuse blocks of ended or preempted requests only after every step in flight that may write them."""
    ends_outgrown: bool = True
    """End a request whose tokens outgrow the usable pool with a capacity reason (vLLM waits for ever)."""

    def __post_init__(self) -> None:
        for field, low, high in (
            ("block_size", 1, MAX_BLOCK_SIZE),
            ("num_kv_blocks", 1 + self.null_block, MAX_KV_BLOCKS),
            ("max_num_batched_tokens", 1, MAX_BATCHED_TOKENS),
            ("max_num_seqs", 1, MAX_BATCHED_TOKENS),
            ("max_num_speculative_tokens", 0, MAX_BATCHED_TOKENS),
        ):
            if (value := getattr(self, field)) < low:
                raise ConfigError(f"{field}={value} is below its minimum {low}: give at least {low}")
            if value > high:
                raise ConfigError(f"{field}={value} is above its maximum {high}: give at most {high}")
        if self.adapters and not self.max_adapters:
            raise ConfigError(f"max_adapters=0 leaves no slot for {', '.join(self.adapters)}: give at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len={self.max_model_len} is below its minimum 2 (one prompt token, one output)"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} exceeds max_num_batched_tokens={self.max_num_batched_tokens}: "
                "each running request needs one token per step; lower the first or raise the second"
            )

    @property
    def num_usable_blocks(self) -> int:
        """KV blocks requests can use: the one pool size shown everywhere."""
        return self.num_kv_blocks - self.null_block

    @property
    def usable_tokens(self) -> int:
        """Tokens of context the whole pool holds."""
        return self.num_usable_blocks * self.block_size
