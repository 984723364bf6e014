"""Named settings of the one scheduler. A profile only chooses values; no code asks which one is in force.

`vllm`, the default, is what vLLM 0.32's scheduler does. `paper` is the plain rules that the documentation's tables are
computed with: no null block, no prefix cache, no reservation.
"""

from typing import Any

import msgspec

from schedtop.engine.knobs import KnobValue


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `EngineConfig` and of `Knobs` that differ from their defaults."""

    config: dict[str, Any]
    knobs: dict[str, KnobValue]


PROFILES: dict[str, Profile] = {
    "vllm": Profile(config={}, knobs={}),
    "paper": Profile(
        config={"null_block": False, "max_model_len": None, "watermark_counts_null_block": False},
        knobs={"reserve_full_prompt": False, "prefix_caching": False},
    ),
}
