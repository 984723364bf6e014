"""What the plugin needs of vLLM's scheduler, attribute by attribute: checked once at start.

vLLM's scheduler interface isn't public. Where something is missing the engine serves on without the controls that
need it, and says which and why; nothing here may end the engine.
"""

from collections.abc import Callable
from typing import Any

from schedtop.engine.knobs import KnobSpec

TESTED_VERSIONS = ("0.32",)

NEEDED = (
    "requests", "running", "waiting", "finished_req_ids", "block_size", "max_model_len", "max_num_running_reqs",
    "scheduler_config.max_num_batched_tokens", "kv_cache_config.num_blocks", "vllm_config.model_config",
    "kv_cache_manager.get_blocks", "kv_cache_manager.block_pool.get_num_free_blocks",
)  # fmt: skip
"""Without these there is nothing to show: no control socket at all."""

KNOB_NEEDS: dict[str, tuple[str, ...]] = {
    "max_num_batched_tokens": ("max_num_scheduled_tokens", "scheduler_config.max_num_batched_tokens"),
    "max_num_seqs": ("max_num_active_reqs", "max_num_running_reqs"),
    "long_prefill_token_threshold": ("scheduler_config.long_prefill_token_threshold",),
    "long_prefill_token_threshold_adaptive": ("adaptive_long_prefill_threshold",),
    "watermark": ("kv_cache_manager.watermark_blocks", "kv_cache_config.num_blocks"),
    "reserve_full_prompt": ("scheduler_reserve_full_isl",),
    "policy": ("policy", "waiting", "kv_holding_waiting"),
}
"""Knob -> the attributes it lives in. Every other knob of ours has no counterpart in vLLM."""

COMMAND_NEEDS: dict[str, tuple[str, ...]] = {
    "AbortRequests": ("finish_requests", "update_from_output"),
    "SetPriority": ("waiting",),
    "SetMaxTokens": ("requests",),
    "PreemptRequests": ("_preempt_request", "prev_step_scheduled_req_ids"),
    "HoldRequests": ("_handle_blocked_waiting_request", "_preempt_request", "prev_step_scheduled_req_ids"),
    "ReleaseRequests": ("_handle_blocked_waiting_request",),
    "Pause": ("set_pause_state", "pause_state"),
    "Resume": ("set_pause_state", "pause_state"),
    "Drain": ("set_pause_state", "pause_state"),
    "ResetPrefixCache": ("reset_prefix_cache",),
    "SelfCheck": ("kv_cache_manager.block_pool.blocks",),
}
ALWAYS = (
    "Subscribe", "GetSnapshot", "GetInfo", "SetKnobs", "ConfirmChange", "UndoChange", "DumpSteps",
    "GetStepModel", "GetState", "GetAudit", "NoteRefusal", "HoldLease", "EndLease",
)  # fmt: skip
"""Commands that need nothing beyond `NEEDED`. `AddRequest` is vLLM's own front end's."""

SHOWN_LESS: dict[str, str] = {
    "kv_holding_waiting": "preempted requests that keep blocks aren't shown",
    "deferred_waiting": "requests that wait for something else than room aren't told apart",
    "deferred_frees": "blocks about to be freed count as in use",
    "kv_cache_manager.block_pool.blocks": "there is no map of the pool",
    "kv_cache_manager.enable_caching": "prefix caching is shown as on",
    "scheduler_config.async_scheduling": "async scheduling is shown as off",
    "scheduler_config.enable_chunked_prefill": "chunked prefill is shown as on",
    "parallel_config": "data-parallel engines can't tell their rank: name each with SCHEDTOP_NAME",
}
"""Attribute -> what watchers miss without it."""


def has(scheduler: Any, path: str) -> bool:
    """Whether `scheduler.a.b` exists."""
    for name in path.split("."):
        if not hasattr(scheduler, name):
            return False
        scheduler = getattr(scheduler, name)
    return True


def missing(scheduler: Any) -> list[str]:
    """The attributes without which nothing works."""
    return [path for path in NEEDED if not has(scheduler, path)]


def usable_knobs(scheduler: Any, table: tuple[KnobSpec, ...], say: Callable[[str], None]) -> tuple[KnobSpec, ...]:
    """The knobs this vLLM can turn; `say` hears which of those it should have are missing, and why."""
    usable = []
    for spec in table:
        needs = KNOB_NEEDS.get(spec.name)
        if needs is None:
            continue
        absent = [path for path in needs if not has(scheduler, path)]
        if absent:
            say(f"knob {spec.name} is off: this vLLM's scheduler has no {', '.join(absent)}")
        else:
            usable.append(spec)
    return tuple(usable)


def usable_commands(scheduler: Any, say: Callable[[str], None]) -> list[str]:
    """The commands this vLLM can carry out."""
    commands = list(ALWAYS)
    for command, needs in COMMAND_NEEDS.items():
        absent = [path for path in needs if not has(scheduler, path)]
        if absent:
            say(f"{command} is off: this vLLM's scheduler has no {', '.join(absent)}")
        else:
            commands.append(command)
    for path, what in SHOWN_LESS.items():
        if not has(scheduler, path):
            say(f"{what}: this vLLM's scheduler has no {path}")
    return sorted(commands)
