"""`/metrics`: vLLM's names, labels and buckets wherever we have the thing, `schedtop_*` for the rest.

Numbers of the engine are read from a snapshot of this moment, so they are true without traffic and after a restart of
the gateway; histograms are built here from step records and begin anew with the gateway. No label comes from user
input.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from schedtop.control.http.samples import HISTOGRAMS, Samples
from schedtop.control.http.service import REFRESH_TIMEOUT_S, Service
from schedtop.control.http.traffic import Traffic
from schedtop.control.messages import EngineInfo, SnapshotUpdate
from schedtop.engine.snapshot import Counters, FinishReason, LimitedBy, PauseState, Snapshot, WaitReason

ENGINE_INDEX = "0"
"""vLLM's `engine` label: the data-parallel rank."""
_LABELS = ("model_name", "engine")
Values = dict[tuple[str, ...], float]


class Gauge(NamedTuple):
    """A number of the snapshot; `extra` are its labels besides model and engine."""

    name: str
    help: str
    value: Callable[[Snapshot], float | Values]
    extra: tuple[str, ...] = ()


class Total(NamedTuple):
    """A counter the engine keeps."""

    name: str
    help: str
    value: Callable[[Counters], float | Values]
    extra: tuple[str, ...] = ()


def _usage(snapshot: Snapshot) -> float:
    pool = snapshot.pool
    return (pool.usable - pool.free) / pool.usable if pool.usable else 0.0


def _blocks(snapshot: Snapshot) -> Values:
    states = ("usable", "free", "in_use", "held", "pending", "cached", "shared")
    return {(state,): getattr(snapshot.pool, state) for state in states}


def _knob_numbers(snapshot: Snapshot) -> Values:
    knobs = snapshot.knobs
    values = {name: getattr(knobs, name) for name in knobs.__struct_fields__}
    return {(name,): float(value) for name, value in values.items() if isinstance(value, int | float)}


def _knob_choices(snapshot: Snapshot) -> Values:
    knobs = snapshot.knobs
    chosen = {name: getattr(knobs, name) for name in knobs.__struct_fields__}
    return {
        (name, option.value): float(option is value)
        for name, value in chosen.items() if isinstance(value, StrEnum)
        for option in type(value)
    }  # fmt: skip


GAUGES = (
    Gauge("vllm:num_requests_running", "Number of requests in model execution batches.", lambda s: s.num_running),
    Gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", lambda s: s.num_waiting),
    Gauge("vllm:num_requests_waiting_by_reason", "Waiting requests: for capacity, or deferred by something else.",
          lambda s: {("capacity",): s.num_waiting - s.num_deferred, ("deferred",): s.num_deferred}, ("reason",)),
    Gauge("vllm:engine_sleep_state", "Engine sleep state: an engine of ours that answers is awake.",
          lambda s: {("awake",): 1, ("weights_offloaded",): 0, ("discard_all",): 0}, ("sleep_state",)),
    Gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", _usage),
    Gauge("schedtop_requests_waiting_by_reason", "Waiting requests by what each of them waits for.",
          lambda s: {(reason.value,): s.waiting_by_reason.get(reason.value, 0) for reason in WaitReason}, ("reason",)),
    Gauge("schedtop_kv_blocks", "KV blocks by state; free + in_use + held + pending = usable.", _blocks, ("state",)),
    Gauge("schedtop_pause_state", "1 for the state the engine is in.",
          lambda s: {(state.value,): s.pause is state for state in PauseState}, ("state",)),
    Gauge("schedtop_knob", "Value of each live knob that is a number or a switch.", _knob_numbers, ("knob",)),
    Gauge("schedtop_knob_choice", "1 for the chosen option of each knob with options.", _knob_choices,
          ("knob", "option")),
    Gauge("schedtop_knob_generation", "Number of knob changes since the engine started.", lambda s: s.generation),
    Gauge("schedtop_step", "Number of the engine's newest step.", lambda s: s.step),
    Gauge("schedtop_last_step_age_seconds", "Age of the last finished step when the snapshot was taken.",
          lambda s: s.mono - s.last_step_mono if s.last_step_mono is not None else 0.0),
)  # fmt: skip

TOTALS = (
    Total("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.",
          lambda c: c.prefix_cache_queries),
    Total("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.",
          lambda c: c.prefix_cache_hits - c.external_cache_hits),
    Total("vllm:external_prefix_cache_queries", "Tokens asked of a connector: those not found here.",
          lambda c: c.external_cache_queries),
    Total("vllm:external_prefix_cache_hits", "Prefix cache hits whose KV a connector brought from elsewhere.",
          lambda c: c.external_cache_hits),
    Total("vllm:num_preemptions", "Cumulative number of preemption from the engine.", lambda c: c.preemptions),
    Total("vllm:prompt_tokens", "Number of prefill tokens processed.", lambda c: c.prompt_tokens),
    Total("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.",
          lambda c: {("local_compute",): c.prompt_tokens - c.prefix_cache_hits,
                     ("local_cache_hit",): c.prefix_cache_hits - c.external_cache_hits,
                     ("external_kv_transfer",): c.external_cache_hits}, ("source",)),
    Total("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).",
          lambda c: c.prefix_cache_hits),
    Total("vllm:prompt_tokens_cached_by_source",
          "Number of cached prompt tokens by where they lay; a connector doesn't tell, so its are unspecified.",
          lambda c: {("device",): c.prefix_cache_hits - c.external_cache_hits, ("host",): 0, ("p2p",): 0, ("disk",): 0,
                     ("external_unspecified",): c.external_cache_hits}, ("source",)),
    Total("vllm:generation_tokens", "Number of generation tokens processed.", lambda c: c.generated_tokens),
    Total("vllm:request_success", "Count of successfully processed requests.",
          lambda c: {(reason.value,): c.finished.get(reason.value, 0) for reason in FinishReason},
          ("finished_reason",)),
    Total("schedtop_requests_added", "Requests taken: finished (all reasons) + running + waiting.", lambda c: c.added),
    Total("schedtop_requests_refused", "Requests refused at the door.", lambda c: c.refused),
    Total("schedtop_first_tokens", "Sequences that have emitted a first token, once each.", lambda c: c.first_tokens),
    Total("schedtop_steps", "Steps.", lambda c: c.steps),
    Total("schedtop_computed_tokens", "Tokens scheduled, those computed again included.", lambda c: c.computed_tokens),
    Total("schedtop_lost_tokens", "Computed tokens thrown away by preemptions.", lambda c: c.lost_tokens),
    Total("schedtop_wasted_tokens", "Tokens computed past an end that was found late.", lambda c: c.wasted_tokens),
    Total("schedtop_resumed_cache_queries", "Tokens looked up when preempted requests came back.",
          lambda c: c.resumed_cache_queries),
    Total("schedtop_resumed_cache_hits", "Tokens found when preempted requests came back.",
          lambda c: c.resumed_cache_hits),
)  # fmt: skip

DRAFT_TOTALS = (
    Total("vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", lambda c: c.drafts),
    Total("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", lambda c: c.draft_tokens),
    Total("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", lambda c: c.accepted_tokens),
)
"""Shown, as by vLLM, only where drafts were made room for at start."""


def _accepted_at(length: int) -> Total:
    """Accepted draft tokens by place, for drafts of at most `length` tokens."""

    def by_place(counters: Counters) -> Values:
        counts = dict(enumerate(counters.accepted_at))
        return {(str(place),): counts.get(place, 0) for place in range(length)}

    return Total(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position.", by_place, ("position",)
    )


class Metrics(Collector):
    """The page, and what it is made of."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.samples = Samples(service)
        self._link = service.link
        self.traffic = Traffic(self.registry)
        self.registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    async def page(self, request: web.Request) -> web.Response:
        """`GET /metrics`, in the format the scraper asks for."""
        await self._link.refresh(REFRESH_TIMEOUT_S)
        encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self.registry), headers={"Content-Type": content_type})

    def describe(self) -> list[Metric]:
        """Nothing: names are known without asking the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families. Without an engine only that there is none: old numbers would be lies."""
        is_up, latest = self._link.is_connected, self._link.latest
        yield GaugeMetricFamily("schedtop_engine_up", "1 while an engine answers.", float(is_up))
        yield GaugeMetricFamily("schedtop_websocket_sessions", "Open WebSocket relays.", self.samples.num_websockets)
        if not is_up or latest is None:
            return
        yield from self._engine_families(latest, self._link.welcome.info)

    def _engine_families(self, latest: SnapshotUpdate, info: EngineInfo) -> Iterator[Metric]:
        labels = (info.model, ENGINE_INDEX)
        snapshot = latest.snapshot
        yield GaugeMetricFamily(
            "schedtop_snapshot_age_seconds", "Age of the numbers on this page.", self._link.latest_age_s()
        )
        for gauge in GAUGES:
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=(*_LABELS, *gauge.extra))
            for extra, value in _as_values(gauge.value(snapshot)).items():
                family.add_metric((*labels, *extra), float(value))
            yield family
        for total in (*TOTALS, *self._draft_totals()):
            counter = CounterMetricFamily(total.name, total.help, labels=(*_LABELS, *total.extra))
            for extra, value in _as_values(total.value(snapshot.counters)).items():
                counter.add_metric((*labels, *extra), float(value), created=info.started_wall)
            yield counter
        yield from self._sampled_families(labels)
        yield _cache_config(info, snapshot)
        yield _engine_info(info)

    def _draft_totals(self) -> tuple[Total, ...]:
        """None where no draft can ever be made."""
        ceilings = (spec.high for spec in self._link.welcome.knobs if spec.name == "num_speculative_tokens")
        length = int(next(ceilings, None) or 0)
        return (*DRAFT_TOTALS, _accepted_at(length)) if length else ()

    def _sampled_families(self, labels: tuple[str, ...]) -> Iterator[Metric]:
        """What the gateway has counted itself since it started."""
        for spec in HISTOGRAMS:
            family = HistogramMetricFamily(spec.name, spec.help, labels=_LABELS)
            named = dict(zip(_LABELS, labels, strict=True))
            self.samples.histograms[spec.name].fill(family, named, self.samples.began_wall)
            yield family
        limited = CounterMetricFamily(
            "schedtop_steps_limited", "Steps by what kept them from doing more.", labels=(*_LABELS, "by")
        )
        for limit in LimitedBy:
            limited.add_metric((*labels, limit.value), float(self.samples.limited[limit]))
        yield limited
        rejected = CounterMetricFamily(
            "vllm:admission_rejections", "Admission attempts (of this gateway) rejected by a queue limit, by reason.",
            labels=("model_name", "reason"),
        )  # fmt: skip
        for reason, count in self.samples.rejections.items():
            rejected.add_metric((labels[0], reason), float(count), created=self.samples.began_wall)
        yield rejected
        yield CounterMetricFamily(
            "schedtop_step_records_missed", "Steps that the histograms of this page have not seen.",
            float(self.samples.num_steps_missed),
        )  # fmt: skip


def _as_values(value: float | Values) -> Values:
    return value if isinstance(value, dict) else {(): value}


def _info(name: str, text: str, labels: dict[str, str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), 1.0)
    return family


def _cache_config(info: EngineInfo, snapshot: Snapshot) -> GaugeMetricFamily:
    return _info("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", {
        "engine": ENGINE_INDEX,
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_usable_blocks),
        "kv_cache_size_tokens": str(info.num_usable_blocks * info.block_size),
        "enable_prefix_caching": str(snapshot.knobs.prefix_caching),
    })  # fmt: skip


def _engine_info(info: EngineInfo) -> GaugeMetricFamily:
    return _info("schedtop_engine_info", "Who the engine is.", {
        "name": info.name, "model_name": info.model, "version": info.version, "kind": info.kind,
        "backend": info.backend,
    })  # fmt: skip
