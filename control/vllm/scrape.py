"""A server's `/metrics` page as numbers of its engines: vLLM's and SGLang's names, read only, no vLLM needed.

What a page doesn't have is None, never 0. Nothing here is drawn, and nothing is computed over time (`windows.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from schedtop.control.errors import Disconnected

METRICS_ROUTE = "/metrics"
TIMEOUT_S = 5.0
MAX_PAGE_BYTES = 16 << 20

Bounds = tuple[tuple[float, float], ...]
"""(upper bound, observations up to it), ascending; the last bound is infinite."""


class NotAnEngine(Disconnected):
    """The address answers, but has no metrics of vLLM or SGLang."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One engine at one moment. Gauges and counters by our names; None = not exported by this engine."""

    engine: str
    """vLLM's `engine` label (the data-parallel rank), SGLang's `dp_rank`."""
    kind: str
    model: str | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    waiting_by_reason: dict[str, float] | None = None
    kv_usage: float | None = None
    """Share of the KV pool in use, 0 to 1."""
    num_blocks: int | None = None
    block_size: int | None = None
    counters: dict[str, float | None] = {}
    """By the names in `COUNTERS`."""
    finished: dict[str, float] | None = None
    histograms: dict[str, Bounds | None] = {}
    """By the names in `HISTOGRAMS`, in seconds."""


NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "num_running": ("vllm:num_requests_running",),
        "num_waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "preemptions": ("vllm:num_preemptions_total",),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "generated_tokens": ("vllm:generation_tokens_total",),
        "prefix_cache_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "prefix_cache_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
        "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
        "finished": ("vllm:request_success_total",),
        "ttft": ("vllm:time_to_first_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "queue": ("vllm:request_queue_time_seconds",),
    },
    "sglang": {
        "num_running": ("sglang:num_running_reqs",),
        "num_waiting": ("sglang:num_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
        "preemptions": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generated_tokens": ("sglang:generation_tokens_total",),
        "prefix_cache_queries": (),
        "prefix_cache_hits": ("sglang:cached_tokens_total",),
        "draft_tokens": (),
        "accepted_tokens": (),
        "finished": (),
        "ttft": ("sglang:time_to_first_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "e2e": ("sglang:e2e_request_latency_seconds",),
        "queue": ("sglang:queue_time_seconds",),
    },
}
"""Engine kind -> our name -> its names, the newest first."""

COUNTERS = (
    "prompt_tokens", "generated_tokens", "preemptions", "prefix_cache_queries", "prefix_cache_hits", "draft_tokens",
    "accepted_tokens",
)  # fmt: skip
HISTOGRAMS = ("ttft", "itl", "e2e", "queue")
NEVER_EXPORTED = (
    "live requests one by one", "knobs and their values", "steps: budget, chunks, time", "who was preempted for whom",
    "tokens lost to preemption",
)  # fmt: skip
"""What no `/metrics` page tells and the control socket does."""
_RANK_LABELS = ("engine", "dp_rank")

Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


def read(page: str) -> list[Reading]:
    """The engines on a page, by number. Raises `NotAnEngine` when it has none, or isn't a metrics page."""
    try:
        by_engine = _by_engine(page)
    except ValueError as error:
        raise NotAnEngine(f"its {METRICS_ROUTE} can't be read as Prometheus text: {error}") from None
    if not by_engine:
        raise NotAnEngine(f"its {METRICS_ROUTE} has no metrics of vLLM or SGLang; SGLang wants --enable-metrics")
    num_engines = Counter(kind for kind, _ in by_engine)
    return [
        _reading(kind, engine, samples, num_engines[kind])
        for (kind, engine), samples in sorted(by_engine.items(), key=_place)
    ]


def is_plain_server(page: str) -> bool:
    """Whether a page is vLLM's or SGLang's own, not that of one of our gateways (which has vLLM's names too)."""
    return "schedtop_" not in page and any(f"\n{kind}:" in f"\n{page}" for kind in NAMES)


def _place(item: tuple[tuple[str, str], Samples]) -> tuple[str, int, str]:
    kind, engine = item[0]
    return kind, int(engine) if engine.isdigit() else 1 << 30, engine


def _by_engine(page: str) -> dict[tuple[str, str], Samples]:
    found: defaultdict[tuple[str, str], Samples] = defaultdict(lambda: defaultdict(list))
    for family in text_string_to_metric_families(page):
        kind = family.name.partition(":")[0]
        if kind not in NAMES:
            continue
        for sample in family.samples:
            rank = next((sample.labels[label] for label in _RANK_LABELS if label in sample.labels), None)
            if rank is None and kind == "vllm":
                continue  # of the front end, not of one engine
            found[kind, rank or "0"][sample.name].append((sample.labels, sample.value))
    return dict(found)


def _reading(kind: str, engine: str, samples: Samples, num_engines: int) -> Reading:
    names = NAMES[kind]
    cache = next(iter(samples.get("vllm:cache_config_info", ())), ({}, 1.0))[0]
    slots = _total(samples, ("sglang:max_total_num_tokens",))
    model = next(
        (labels["model_name"] for rows in samples.values() for labels, _ in rows if "model_name" in labels), None
    )
    return Reading(
        engine=engine,
        kind=kind,
        model=model,
        num_running=_total(samples, names["num_running"]),
        num_waiting=_total(samples, names["num_waiting"]),
        waiting_by_reason=_by_label(samples, ("vllm:num_requests_waiting_by_reason",), "reason"),
        kv_usage=_total(samples, names["kv_usage"]),
        num_blocks=_share(_number(cache.get("num_gpu_blocks")), num_engines) if kind == "vllm" else _whole(slots),
        block_size=_number(cache.get("block_size")) if kind == "vllm" else (None if slots is None else 1),
        counters={name: _total(samples, names[name]) for name in COUNTERS},
        finished=_by_label(samples, names["finished"], "finished_reason"),
        histograms={name: _histogram(samples, names[name]) for name in HISTOGRAMS},
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _share(of_all: int | None, num_engines: int) -> int | None:
    """vLLM tells for each of its engines the blocks of all of them together."""
    return None if of_all is None else of_all // num_engines


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _first(samples: Samples, names: Iterable[str]) -> list[tuple[Labels, float]] | None:
    return next((samples[name] for name in names if name in samples), None)


def _total(samples: Samples, names: Iterable[str]) -> float | None:
    """The sum over whatever other labels there are; tensor-parallel ranks tell the same, so one of them counts."""
    rows = _first(samples, names)
    return None if rows is None else sum(value for labels, value in rows if _is_first_rank(labels))


def _is_first_rank(labels: Labels) -> bool:
    return labels.get("tp_rank", "0") == "0" and labels.get("pp_rank", "0") == "0"


def _by_label(samples: Samples, names: Iterable[str], label: str) -> dict[str, float] | None:
    rows = _first(samples, names)
    if rows is None:
        return None
    sums: defaultdict[str, float] = defaultdict(float)
    for labels, value in rows:
        sums[labels.get(label, "")] += value
    return dict(sums)


def _histogram(samples: Samples, names: Iterable[str]) -> Bounds | None:
    rows = _first(samples, [f"{name}_bucket" for name in names])
    if rows is None:
        return None
    sums: defaultdict[float, float] = defaultdict(float)
    for labels, value in rows:
        if _is_first_rank(labels):
            sums[float(labels["le"])] += value
    return tuple(sorted(sums.items()))


def page_address(url: str) -> str:
    """Where a server's metrics are, given its address with or without the route."""
    address = url.rstrip("/").removesuffix("/v1")
    return address if address.endswith(METRICS_ROUTE) else address + METRICS_ROUTE


async def fetch(session: Any, url: str) -> str:
    """The page, with an `aiohttp.ClientSession`. Raises `Disconnected`."""
    import aiohttp

    address = page_address(url)
    try:
        async with session.get(address, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
            if response.status != 200:
                raise NotAnEngine(f"{address} answered {response.status}: no metrics there")
            data: bytes = await response.content.read(MAX_PAGE_BYTES + 1)
            while len(data) <= MAX_PAGE_BYTES and (more := await response.content.read(MAX_PAGE_BYTES)):
                data += more
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise Disconnected(f"nothing answers at {address}: {error or 'no answer in time'}; is it running?") from None
    if len(data) > MAX_PAGE_BYTES:
        raise NotAnEngine(f"{address} is longer than {MAX_PAGE_BYTES >> 20} MiB: no metrics page")
    return data.decode("utf-8", "replace")
