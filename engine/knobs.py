"""The live settings of the scheduler, each declared once.

`Knobs` is frozen and replaced whole at a step boundary; `KNOB_TABLE` describes each field, and help texts, HTTP
schema, TUI panel, docs and tests are generated from it. What is allocated at start is not here (`config.py`).
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import Conflict, KnobRefused


class SchedulingPolicy(StrEnum):
    """Order of the waiting queue."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class VictimRule(StrEnum):
    """Which running request is preempted when blocks run out."""

    NEWEST = "newest"
    LEAST_COMPUTED = "least_computed"
    MOST_BLOCKS = "most_blocks"


class AdmissionRule(StrEnum):
    """What happens behind a waiting request that doesn't fit."""

    STRICT = "strict"
    SKIP = "skip"


KnobValue = bool | int | float | str


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One consistent set of live settings; `schedule()` reads it once per step."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    preempt_on_arrival: bool = False
    victim: VictimRule = VictimRule.NEWEST
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    reserve_output: bool = False
    max_preemptions: int = 0
    admission: AdmissionRule = AdmissionRule.STRICT
    max_bypass: int = 8
    max_num_queued_reqs: int = 0
    max_num_queued_tokens: int = 0
    kv_block_limit: int = 0
    prefix_caching: bool = True
    num_speculative_tokens: int = 0
    async_scheduling: bool = False


OURS, VLLM = "schedtop", "vllm"


class KnobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a person or a program needs to know to turn one knob.

    `low` and `high` bound the value (inclusive; None = open); `ceiling` replaces `high` by what this engine allocated.
    """

    name: str
    unit: str
    kind: str  # "int" | "float" | "bool" | "choice"
    summary: str
    effect: str = "next step"
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    default: KnobValue
    engines: tuple[str, ...] = (OURS,)
    """Kinds of engine (`EngineInfo.kind`) that have it."""


_Ceiling = Callable[[EngineConfig], float]


def _knob(
    name: str,
    unit: str,
    summary: str,
    low: float | None = None,
    high: float | None = None,
    ceiling: _Ceiling | None = None,
    effect: str = "next step",
    engines: tuple[str, ...] = (OURS,),
) -> tuple[KnobSpec, _Ceiling | None]:
    default = getattr(Knobs(), name)
    choices: tuple[str, ...] = ()
    match default:
        case bool():
            kind = "bool"
        case StrEnum():
            kind, choices = "choice", tuple(member.value for member in type(default))
            default = default.value
        case float():
            kind = "float"
        case _:
            kind = "int"
    spec = KnobSpec(
        name=name, unit=unit, kind=kind, summary=summary, effect=effect,
        low=low, high=high, choices=choices, default=default, engines=engines,
    )  # fmt: skip
    return spec, ceiling


_BOTH = (OURS, VLLM)
_DECLARED = (
    _knob("max_num_batched_tokens", "tokens/step", "Token budget of one step, shared by decodes and prefill chunks.",
          low=1, ceiling=lambda c: c.max_num_batched_tokens, engines=_BOTH),
    _knob("max_num_seqs", "requests", "Cap on running requests. Lowering it drains; nobody running is cut.",
          low=1, ceiling=lambda c: c.max_num_seqs, engines=_BOTH),
    _knob("long_prefill_token_threshold", "tokens/step",
          "Most tokens one request may take from a step; 0 = off; not applied to a lone request.",
          low=0, ceiling=lambda c: c.max_num_batched_tokens, engines=_BOTH),
    _knob("long_prefill_token_threshold_adaptive", "",
          "Floor the threshold at the allocated budget divided by the number of eligible requests.", engines=_BOTH),
    _knob("enable_chunked_prefill", "", "Split prompts over steps; off: a prompt waits until it fits one step."),
    _knob("policy", "", "Order of the waiting queue: fcfs, or priority by (priority, arrival, id), lower first.",
          engines=_BOTH),
    _knob("preempt_on_arrival", "",
          "Under policy priority, a waiting request may evict a running one of larger priority value."),
    _knob("victim", "", "Which running request is preempted when blocks run out (after priority, under that policy)."),
    _knob("watermark", "fraction", "Share of the KV blocks kept free when a waiting request is admitted.",
          low=0.0, high=0.9, engines=_BOTH),
    _knob("reserve_full_prompt", "", "Admit a request only if its whole prompt fits, not just its first chunk.",
          engines=_BOTH),
    _knob("reserve_output", "", "Admit a request only if prompt + max_tokens fit: no preemption, more waiting."),
    _knob("max_preemptions", "count", "A request preempted this often is no victim while another exists; 0 = no cap.",
          low=0, high=1_000_000),
    _knob("admission", "", "strict: a blocked head holds back all behind it; skip: smaller requests may pass it."),
    _knob("max_bypass", "count", "With admission skip: how many requests may pass one blocked request.",
          low=0, high=1_000_000),
    _knob("max_num_queued_reqs", "requests", "Refuse new requests while so many wait; 0 = no limit.",
          low=0, high=10_000_000, effect="next request"),
    _knob("max_num_queued_tokens", "tokens", "Refuse new requests while so many prompt tokens wait; 0 = no limit.",
          low=0, high=10_000_000_000, effect="next request"),
    _knob("kv_block_limit", "blocks", "Use at most so many blocks; 0 = all. Who needs more waits until it is raised.",
          low=0, ceiling=lambda c: c.num_usable_blocks),
    _knob("prefix_caching", "", "Look up and keep hashed blocks of finished and preempted requests."),
    _knob("num_speculative_tokens", "tokens", "Draft tokens per request and step; 0 = off.",
          low=0, ceiling=lambda c: c.max_num_speculative_tokens),
    _knob("async_scheduling", "", "Plan step N+1 while step N runs."),
)  # fmt: skip


def knob_table(config: EngineConfig) -> tuple[KnobSpec, ...]:
    """The knobs of an engine started with `config`, their ceilings filled in."""
    return tuple(
        msgspec.structs.replace(spec, high=ceiling(config)) if ceiling else spec for spec, ceiling in _DECLARED
    )


KNOB_NAMES: tuple[str, ...] = tuple(spec.name for spec, _ in _DECLARED)
ALLOCATED_KNOBS = frozenset(spec.name for spec, ceiling in _DECLARED if ceiling)
"""Those whose upper end is what this engine was started with."""


def initial_knobs(config: EngineConfig, **overrides: Any) -> Knobs:
    """Start values: the ceilings where a knob has one that defaults below it, then `overrides`, checked.

    Raises `KnobRefused` as `change_knobs` does.
    """
    knobs = Knobs(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        num_speculative_tokens=config.max_num_speculative_tokens,
    )
    return change_knobs(knobs, overrides, knob_table(config))


def check_generation(expected: int | None, actual: int) -> None:
    """Raise `Conflict` for a change that is based on other knobs than there are; None = based on whatever is there."""
    if expected is None or expected == actual:
        return
    why = "somebody changed them since" if 0 <= expected < actual else "this engine was never there, or began anew"
    raise Conflict(
        f"the change is based on generation {expected}, the knobs are at {actual}: {why}; read them again and repeat"
    )


def change_knobs(knobs: Knobs, changes: Mapping[str, Any], table: tuple[KnobSpec, ...]) -> Knobs:
    """`knobs` with `changes` applied, all or none.

    Raises `KnobRefused` naming the first bad knob, its value, the limit and the way out.
    """
    specs = {spec.name: spec for spec in table}
    checked = {name: _check(specs, name, value) for name, value in changes.items()}
    return msgspec.structs.replace(knobs, **checked)


def _check(specs: Mapping[str, KnobSpec], name: str, value: Any) -> Any:
    spec = specs.get(name)
    if spec is None and name in KNOB_NAMES:
        raise KnobRefused(f"this engine has no knob {name}, other kinds have it; `schedtop knobs` lists those it has")
    if spec is None:
        raise KnobRefused(f"no knob is called {name!r}{_nearest(name, specs)}; `schedtop knobs` lists them all")
    match spec.kind:
        case "bool":
            if not isinstance(value, bool):
                raise KnobRefused(f"{name}={value!r} is not true or false")
            return value
        case "choice":
            if value not in spec.choices:
                raise KnobRefused(f"{name}={value!r} is not one of {', '.join(spec.choices)}")
            return type(getattr(Knobs(), name))(value)
        case "int":
            if isinstance(value, bool) or not isinstance(value, int):
                raise KnobRefused(f"{name}={value!r} is not a whole number{_range(spec)}")
        case _:
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise KnobRefused(f"{name}={value!r} is not a number{_range(spec)}")
            value = float(value)
    if spec.low is not None and value < spec.low:
        raise KnobRefused(f"{name}={value} is below its minimum {spec.low:g}{_range(spec)}")
    if spec.high is not None and value > spec.high:
        if name not in ALLOCATED_KNOBS:
            raise KnobRefused(f"{name}={value} is above its maximum {spec.high:g}{_range(spec)}")
        raise KnobRefused(
            f"{name}={value} is above its ceiling {spec.high:g}{_range(spec)}; a larger one must be allocated at start"
        )
    return value


def _range(spec: KnobSpec) -> str:
    if spec.low is None or spec.high is None:
        return ""
    return f" (give {spec.low:g} to {spec.high:g}{' ' + spec.unit if spec.unit else ''})"


def _nearest(name: str, specs: Mapping[str, KnobSpec]) -> str:
    import difflib

    close = difflib.get_close_matches(name, specs, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
