"""Makes up traces: for each kind, and each seed of it, one configuration with requests and operator actions.

Plain data, no vLLM and nothing of this project: `record.py` has vLLM's scheduler decide what each trace expects.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Json = dict[str, Any]
Span = tuple[int, int]
Prompt = Callable[[Random, int, int], list[list[int]]]
"""(random, block size, request number) -> prompt segments (token seed, number of tokens)."""

OPERATORS_TURN = ("set", "pause", "preempt", "max_tokens")


def unique(lengths: Span) -> Prompt:
    """Prompts that share nothing."""
    return lambda rng, size, number: [[2000 + number, rng.randint(*lengths)]]


def shared(lengths: Span, chance: float = 0.6) -> Prompt:
    """Prompts of which many begin with a part of one of three common prefixes."""

    def make(rng: Random, size: int, number: int) -> list[list[int]]:
        own = [2000 + number, rng.randint(*lengths)]
        if rng.random() > chance:
            return [own]
        length = rng.choice((rng.randint(1, 6) * size, rng.randint(size, 6 * size)))
        return [[1000 + rng.randrange(3), length], own]

    return make


def whole_blocks(rng: Random, size: int, number: int) -> list[list[int]]:
    """Prompts of whole blocks, many equal to, or a prefix of, an earlier one: the last-token rule."""
    base = [1000 + rng.randrange(3), size * rng.randint(1, 6)]
    return [base] if rng.random() < 0.6 else [base, [2000 + number, size * rng.randint(0, 3)]]


def one_past_blocks(rng: Random, size: int, number: int) -> list[list[int]]:
    """Equal prompts one token longer than whole blocks: a hit leaves a single token."""
    return [[900, size * rng.randint(1, 3) + 1]]


def tiny(rng: Random, size: int, number: int) -> list[list[int]]:
    """Prompts from one token up, around block borders."""
    return [[rng.choice((900, 2000 + number)), max(1, size * rng.randint(0, 3) + rng.randint(-1, 1))]]


@dataclass(frozen=True)
class Kind:
    """The ranges that the traces of one kind are drawn from. In `config` a list means: one of these."""

    config: Json
    prompt: Prompt
    requests: Span = (14, 30)
    answers: Span = (3, 40)
    gap: int = 3
    """Largest number of iterations between two arrivals."""
    stops: float = 0.3
    """Share of requests that end by EOS."""
    priorities: tuple[int, ...] = (0,)
    operations: tuple[str, ...] = ()
    num_actions: Span = (0, 0)
    until: int = 130
    """Iteration of the last action."""
    max_iters: int = 1500
    extra: list[Json] = field(default_factory=list)
    """Requests that every trace of the kind has, first."""


ROOMY: Json = {"block_size": [4, 8, 16], "num_blocks": 2000, "max_num_batched_tokens": 256, "max_num_seqs": 16}
CHUNKLESS: Json = {**ROOMY, "max_num_batched_tokens": 512, "max_model_len": 512, "enable_chunked_prefill": False}
TIGHT: Json = {"block_size": [4, 8], "num_blocks": range(36, 58), "max_num_batched_tokens": [64, 128, 256]}
TURNED: Json = {"block_size": 8, "num_blocks": range(60, 110), "max_num_batched_tokens": 256, "max_num_seqs": 12}
PRIORITY: Json = {"policy": "priority"}
ASYNC: Json = {"async_scheduling": True}
LEVELS = (0, 0, 1, 2, 5)
SMALL = unique((6, 34))
LONG_ANSWERS = (20, 70)
PAST_END = (40, 200)
BUSY = (14, 24)

KINDS: dict[str, Kind] = {
    "basic": Kind(ROOMY, unique((4, 180)), (30, 44)),
    "chunk": Kind({**ROOMY, "max_num_batched_tokens": [32, 48, 64], "max_num_seqs": [4, 8]}, unique((20, 300))),
    "prefix": Kind(ROOMY, shared((4, 60), 0.8)),
    "prefix_exact": Kind(ROOMY, whole_blocks),
    "prefix_evict": Kind({**ROOMY, "block_size": 8, "num_blocks": range(40, 50)}, shared((8, 50))),
    "active": Kind({**ROOMY, "max_num_active_seqs": [1, 2, 3]}, unique((4, 120)), (12, 18)),
    "preempt": Kind({**TIGHT, "max_num_seqs": 8}, shared((8, 60), 0.3), answers=LONG_ANSWERS),
    "nocache_preempt": Kind(
        {**TIGHT, "max_num_seqs": 8, "enable_prefix_caching": False}, shared((8, 60), 0.3), answers=LONG_ANSWERS
    ),
    "prio_preempt": Kind(
        {**TIGHT, **PRIORITY, "max_num_seqs": 16}, shared((8, 60), 0.3), answers=LONG_ANSWERS, priorities=LEVELS
    ),
    "watermark": Kind({**TIGHT, "block_size": 8, "watermark": 0.02}, shared((8, 80), 0.3), answers=LONG_ANSWERS),
    "watermark_big": Kind({**TIGHT, "block_size": 8, "watermark": [0.1, 0.2, 0.35]}, unique((8, 120))),
    "threshold": Kind(
        {**ROOMY, "max_num_batched_tokens": [64, 128], "max_num_seqs": 8, "long_prefill_token_threshold": [16, 40]},
        unique((20, 300)),
        gap=6,
    ),
    "threshold_adaptive": Kind(
        {
            **ROOMY,
            "max_num_batched_tokens": 128,
            "max_num_seqs": 8,
            "long_prefill_token_threshold": [0, 1, 8, 24],
            "long_prefill_token_threshold_adaptive": True,
        },
        unique((20, 260)),
        gap=6,
    ),
    "nochunk": Kind(
        {
            **ROOMY,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "max_model_len": 512,
            "enable_chunked_prefill": False,
        },
        shared((60, 320), 0.2),
        (12, 18),
    ),
    "nochunk_threshold": Kind(
        {
            **CHUNKLESS,
            "max_num_scheduled_tokens": [96, 200],
            "long_prefill_token_threshold": [64, 150],
        },
        shared((60, 320), 0.2),
    ),
    "noreserve": Kind(
        {
            "block_size": 8,
            "num_blocks": range(44, 60),
            "max_num_batched_tokens": 32,
            "max_num_seqs": 8,
            "scheduler_reserve_full_isl": False,
        },
        unique((40, 200)),
        (12, 16),
    ),
    "modellen": Kind(
        {**ROOMY, "max_num_batched_tokens": 128, "max_model_len": 128}, unique((20, 120)), answers=(40, 200)
    ),
    "modellen_spec": Kind(
        {**ROOMY, "max_model_len": 64, "num_speculative_tokens": [2, 5]}, shared((4, 30)), answers=(30, 80)
    ),
    "outgrow": Kind(
        {"block_size": 8, "num_blocks": 21, "max_num_batched_tokens": 256},
        unique((8, 30)),
        (3, 6),
        max_iters=200,
        extra=[{"prompt": [[5, 100]], "max_tokens": 200}],
    ),
    "starve": Kind(
        {"block_size": 8, "num_blocks": 21, "max_num_batched_tokens": 256},
        unique((20, 60)),
        (4, 8),
        (3, 9),
        1,
        max_iters=80,
        extra=[{"prompt": [[5, 60]], "max_tokens": 5}, {"prompt": [[77, 200]], "max_tokens": 5}],
    ),
    "spec": Kind({**ROOMY, "num_speculative_tokens": [1, 2, 3]}, shared((4, 60))),
    "spec_pad": Kind(
        {**ROOMY, "block_size": 8, "max_num_batched_tokens": [16, 64], "num_speculative_tokens": 3}, one_past_blocks
    ),
    "spec_preempt": Kind(
        {**TIGHT, "block_size": 8, "max_num_batched_tokens": 96, "num_speculative_tokens": [3, 5]}, shared((10, 60))
    ),
    "abort": Kind(
        {"block_size": 8, "num_blocks": range(44, 66), "max_num_batched_tokens": 256},
        shared((8, 70)),
        operations=("abort",),
        num_actions=(8, 14),
        until=60,
    ),
    "force": Kind(TURNED, shared((8, 70)), operations=("preempt",), num_actions=(20, 40), until=80),
    "knobs": Kind(TURNED, shared((8, 80)), (18, 22), operations=OPERATORS_TURN, num_actions=BUSY),
    "prio_knobs": Kind(
        {**TURNED, **PRIORITY},
        shared((8, 80)),
        (18, 22),
        priorities=LEVELS,
        operations=(*OPERATORS_TURN, "prio"),
        num_actions=BUSY,
    ),
    "async": Kind({**ROOMY, **ASYNC}, unique((4, 180))),
    "async_chunk": Kind({**ROOMY, **ASYNC, "max_num_batched_tokens": [32, 64]}, tiny, (20, 40), gap=1),
    "async_prefix": Kind({**ROOMY, **ASYNC}, shared((4, 60), 0.8)),
    "async_prefix_exact": Kind({**ROOMY, **ASYNC}, whole_blocks),
    "async_preempt": Kind({**TIGHT, **ASYNC, "max_num_seqs": [8, 16]}, shared((8, 60), 0.3), answers=LONG_ANSWERS),
    "async_prio": Kind(
        {**TIGHT, **ASYNC, **PRIORITY, "max_num_seqs": [8, 16]},
        shared((8, 60), 0.3),
        answers=LONG_ANSWERS,
        priorities=LEVELS,
    ),
    "async_abort": Kind(
        {**ASYNC, "block_size": 8, "num_blocks": range(44, 66), "max_num_batched_tokens": 256},
        shared((8, 70)),
        operations=("abort",),
        num_actions=(8, 14),
        until=60,
    ),
    "async_force": Kind({**TURNED, **ASYNC}, shared((8, 70)), operations=("preempt",), num_actions=(20, 40), until=80),
    "async_knobs": Kind({**TURNED, **ASYNC}, shared((8, 80)), (18, 22), operations=OPERATORS_TURN, num_actions=BUSY),
    "async_hammer": Kind(
        {
            **ROOMY,
            **ASYNC,
            "max_num_batched_tokens": [24, 64],
            "num_blocks": [40, 2000],
            "policy": ["fcfs", "priority"],
        },
        shared((1, 60)),
        (4, 8),
        answers=(8, 40),
        priorities=LEVELS,
        operations=("preempt", "preempt", "preempt", "preempt", "abort"),
        num_actions=(60, 100),
        until=60,
    ),
    "async_spec": Kind({**ROOMY, **ASYNC, "num_speculative_tokens": [1, 2, 3]}, shared((4, 60))),
    "async_spec_pad": Kind(
        {**ROOMY, **ASYNC, "block_size": 8, "max_num_batched_tokens": [16, 64], "num_speculative_tokens": 3},
        one_past_blocks,
    ),
    "async_spec_preempt": Kind(
        {**TIGHT, **ASYNC, "block_size": 8, "max_num_batched_tokens": 96, "num_speculative_tokens": [2, 4]},
        shared((10, 60)),
    ),
    "async_spec_modellen": Kind(
        {**ROOMY, **ASYNC, "max_model_len": 64, "num_speculative_tokens": [2, 5]}, shared((4, 30)), answers=(30, 80)
    ),
    "async_modellen": Kind({**ROOMY, **ASYNC, "max_model_len": 128}, unique((20, 120)), answers=(40, 200)),
    "tiny": Kind({**ROOMY, "max_num_batched_tokens": [8, 16, 64], "max_num_seqs": [2, 8]}, tiny, (30, 50), (1, 6), 1),
}

for _name, _config in {"edge": {}, "edge_async": ASYNC}.items():
    KINDS[_name] = Kind(
        {
            "block_size": [1, 2, 3, 32],
            "num_blocks": [20, 48, 500],
            "max_num_batched_tokens": [16, 64],
            "max_num_scheduled_tokens": [1, 2, 7],
            "max_num_seqs": [1, 2, 16],
            "max_model_len": [16, 40, 4096],
            "policy": ["fcfs", "priority"],
            "watermark": [0.0, 0.5, 0.9],
            "scheduler_reserve_full_isl": [True, False],
            **_config,
        },
        shared((1, 90), 0.4),
        answers=(1, 12),
        gap=1,
        priorities=LEVELS,
        operations=("abort", "preempt", "prio", "max_tokens"),
        num_actions=(10, 30),
        max_iters=700,
    )

EVERYTHING: Json = {
    "block_size": [4, 8, 16],
    "num_blocks": range(40, 90),
    "max_num_batched_tokens": [48, 128, 256],
    "max_num_scheduled_tokens": [None, 24, 48],
    "max_num_seqs": [6, 12],
    "max_num_active_seqs": [None, 3, 6],
    "max_model_len": [100, 160, 4096],
    "long_prefill_token_threshold": [0, 0, 12, 40],
    "long_prefill_token_threshold_adaptive": [False, True],
    "enable_chunked_prefill": [True, True, True, False],
    "policy": ["fcfs", "priority"],
    "watermark": [0.0, 0.0, 0.05, 0.2],
    "scheduler_reserve_full_isl": [True, False],
    "enable_prefix_caching": [True, True, True, False],
}
"""All settings at once: the combinations that no single kind has."""

for _name, _config in {
    "mix": {},
    "mix_async": ASYNC,
    "mix_async_prio": {**ASYNC, **PRIORITY},
    "mix_prio": PRIORITY,
    "mix_spec": {"num_speculative_tokens": [1, 3], "long_prefill_token_threshold": 0, "enable_chunked_prefill": True},
    "mix_async_spec": {
        **ASYNC,
        "num_speculative_tokens": [1, 3],
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True,
    },
}.items():
    KINDS[_name] = Kind(
        {**EVERYTHING, **_config},
        shared((1, 70), 0.5),
        answers=(1, 50),
        gap=4,
        priorities=LEVELS,
        operations=(*OPERATORS_TURN, "prio", "abort", "preempt", "preempt"),
        num_actions=(20, 60),
    )


def make_trace(kind: str, seed: int) -> Json:
    """The trace of a kind and a seed: always the same one."""
    recipe, rng = KINDS[kind], Random(f"{kind}/{seed}")
    config = {key: _choose(rng, values) for key, values in recipe.config.items()}
    requests = _requests(recipe, rng, config)
    actions = _actions(recipe, rng, requests, config)
    return {
        "kind": kind,
        "seed": seed,
        "config": {key: value for key, value in config.items() if value is not None},
        "requests": requests,
        "actions": actions,
        "max_iters": recipe.max_iters,
    }


def _choose(rng: Random, values: Any) -> Any:
    return rng.choice(values) if isinstance(values, list | range) else values


def _requests(recipe: Kind, rng: Random, config: Json) -> list[Json]:
    requests: list[Json] = []
    arrival, arrival_time = 0, 0.0
    for number in range(rng.randint(*recipe.requests)):
        arrival += rng.randint(0, recipe.gap)
        if rng.random() < 0.8:  # the others share an arrival time: ties of policy priority
            arrival_time = round(arrival + number / 1000, 3)
        request: Json = {
            "id": f"r{number}",
            "arrival": arrival,
            "arrival_time": arrival_time,
            "prompt": _fit(recipe.prompt(rng, config.get("block_size", 16), number), config),
            "seed": number + 1,
            "max_tokens": rng.randint(*recipe.answers),
            "priority": rng.choice(recipe.priorities),
        }
        if rng.random() < recipe.stops:
            request["stop_after"] = rng.randint(1, request["max_tokens"])
        if number < len(recipe.extra):
            request.update(recipe.extra[number])
            request.pop("stop_after", None)
        requests.append(request)
    return requests


def _fit(prompt: list[list[int]], config: Json) -> list[list[int]]:
    """Cut a prompt below the model's length: vLLM refuses longer ones before its scheduler sees them."""
    room, fitting = config.get("max_model_len", 4096) - 1, []
    for seed, count in prompt:
        count = min(count, room)
        room -= count
        if count:
            fitting.append([seed, count])
    return fitting


def _actions(recipe: Kind, rng: Random, requests: list[Json], config: Json) -> list[Json]:
    """Random actions, then everything turned back so that all requests can end."""
    if not recipe.operations:
        return []
    count = rng.randint(*recipe.num_actions)
    times = sorted(rng.randint(1, recipe.until) for _ in range(count))
    actions = [action for at in times for action in _action(recipe, rng, at, requests, config)]
    if "set" in recipe.operations:
        end = recipe.until + 1
        actions += [
            {"at": end, "op": "pause", "value": 0},
            {"at": end, "op": "set", "knob": "watermark", "value": 0.0},
            {"at": end, "op": "set", "knob": "max_num_active_reqs", "value": config["max_num_seqs"]},
            {"at": end, "op": "set", "knob": "max_num_scheduled_tokens", "value": config["max_num_batched_tokens"]},
        ]
    return sorted(actions, key=lambda action: action["at"])


def _action(recipe: Kind, rng: Random, at: int, requests: list[Json], config: Json) -> list[Json]:
    op, request_id = rng.choice(recipe.operations), rng.choice(requests)["id"]
    match op:
        case "set":
            return [{"at": at, "op": op, **_setting(rng, config)}]
        case "pause":
            pause = {"at": at, "op": op, "value": rng.choice((1, 2))}
            return [pause, {"at": at + rng.randint(1, 6), "op": op, "value": 0}]
        case "preempt":
            return [{"at": at, "op": op, "id": request_id, "drop": rng.random() < 0.4}]
        case "max_tokens":
            return [{"at": at, "op": op, "id": request_id, "value": rng.randint(1, 60)}]
        case "prio":
            return [{"at": at, "op": op, "id": request_id, "value": rng.randint(0, 6)}]
    return [{"at": at, "op": op, "id": request_id}]


def _setting(rng: Random, config: Json) -> Json:
    most = config["max_num_batched_tokens"]
    values: dict[str, tuple[float, ...]] = {
        "max_num_scheduled_tokens": (16, 32, 64, most),
        "max_num_active_reqs": (1, 2, 4, config["max_num_seqs"]),
        "long_prefill_token_threshold": (0, 8, 24, 64),
        "watermark": (0.0, 0.02, 0.1, 0.3),
    }
    knob = rng.choice(list(values))
    return {"knob": knob, "value": min(rng.choice(values[knob]), most)}
