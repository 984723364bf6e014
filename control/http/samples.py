"""What the gateway counts itself: latencies from step records, sizes and times of the answers it gave.

All of it begins anew with the gateway; what survives a restart is in the engine's own counters (`metrics.py`).
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from schedtop.control.http import histogram
from schedtop.control.http.generation import Answer, Plan
from schedtop.control.http.histogram import Histogram
from schedtop.control.http.service import Service
from schedtop.control.messages import EventBatch, SnapshotUpdate, Welcome
from schedtop.engine.snapshot import EventKind, StepRecord

MAX_REMEMBERED = 4096
"""Requests remembered before those that ended without an answer are looked for."""
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class HistogramSpec(NamedTuple):
    """One histogram; `bounds` None = 1, 2, 5, 10, ... up to the model's length."""

    name: str
    help: str
    bounds: Sequence[float] | None


HISTOGRAMS = (
    HistogramSpec("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.",
                  histogram.TTFT_BOUNDS),
    HistogramSpec("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.",
                  histogram.TOKEN_GAP_BOUNDS),
    HistogramSpec("vllm:request_time_per_output_token_seconds",
                  "Histogram of time_per_output_token_seconds per request.", histogram.TOKEN_GAP_BOUNDS),
    HistogramSpec("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.",
                  histogram.REQUEST_TIME_BOUNDS),
    HistogramSpec("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.",
                  histogram.REQUEST_TIME_BOUNDS),
    HistogramSpec("vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.",
                  histogram.REQUEST_TIME_BOUNDS),
    HistogramSpec("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.",
                  histogram.REQUEST_TIME_BOUNDS),
    HistogramSpec("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.",
                  histogram.REQUEST_TIME_BOUNDS),
    HistogramSpec("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.",
                  histogram.STEP_TOKENS_BOUNDS),
    HistogramSpec("vllm:request_prompt_tokens", "Number of prefill tokens processed.", None),
    HistogramSpec("vllm:request_generation_tokens", "Number of generation tokens processed.", None),
    HistogramSpec("vllm:request_max_num_generation_tokens",
                  "Histogram of maximum number of requested generation tokens.", None),
    HistogramSpec("vllm:request_params_n", "Histogram of the n request parameter.", histogram.N_BOUNDS),
    HistogramSpec("vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", None),
    HistogramSpec("vllm:request_prefill_kv_computed_tokens",
                  "Histogram of new KV tokens computed during prefill (excluding cached tokens).", None),
    HistogramSpec("vllm:request_num_preemptions", "Histogram of the number of times a request was preempted.",
                  histogram.PREEMPTIONS_BOUNDS),
    HistogramSpec("schedtop_step_duration_seconds", "Duration of a step, from planning to taken result.",
                  histogram.STEP_TIME_BOUNDS),
    HistogramSpec("schedtop_step_schedule_seconds", "Time a step spent in planning.", histogram.STEP_TIME_BOUNDS),
    HistogramSpec("schedtop_step_forward_seconds", "Time a step spent in the model.", histogram.STEP_TIME_BOUNDS),
)  # fmt: skip


class Samples:
    """Listens to the engine's connection and to finished answers."""

    def __init__(self, service: Service) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.limited: Counter[str] = Counter()
        self.rejections = dict.fromkeys(REJECTION_REASONS, 0)
        self.num_steps_missed = 0
        self.began_wall = time.time()
        """Since when the histograms count."""
        self.num_websockets = 0
        self._link = service.link
        self._boot_id = ""
        self._last_step: int | None = None
        self._scheduled_at: dict[str, float] = {}
        self._num_preemptions: Counter[str] = Counter()
        self._make_histograms(None)
        service.on_answered.append(self.take_answer)
        service.on_refused.append(self.take_refusal)
        service.link.on_welcome.append(self.take_welcome)
        service.link.on_update.append(self.take_update)
        service.link.on_events.append(self.take_events)

    def _make_histograms(self, max_model_len: int | None) -> None:
        sizes = histogram.one_two_five(max_model_len)
        self.histograms = {spec.name: Histogram(spec.bounds or sizes) for spec in HISTOGRAMS}
        self.began_wall = time.time()

    def take_welcome(self, welcome: Welcome) -> None:
        """Another engine: its steps are counted from one, its latencies are its own."""
        if welcome.info.boot_id == self._boot_id:
            return
        self._boot_id, self._last_step = welcome.info.boot_id, None
        self._make_histograms(welcome.info.max_model_len)

    def take_update(self, update: SnapshotUpdate) -> None:
        """Step records since the last update."""
        for record in update.steps:
            if self._last_step is not None:
                if record.step <= self._last_step:
                    continue
                self.num_steps_missed += record.step - self._last_step - 1
            self._last_step = record.step
            self._take_step(record)

    def _take_step(self, record: StepRecord) -> None:
        self.limited[record.limited_by] += 1
        singles: dict[str, list[float]] = {
            "vllm:time_to_first_token_seconds": record.ttft,
            "vllm:e2e_request_latency_seconds": record.e2e,
            "vllm:request_queue_time_seconds": record.queue_time,
            "vllm:iteration_tokens_total": [record.num_prefill_tokens + record.num_decode_tokens],
            "schedtop_step_duration_seconds": [record.duration_s],
            "schedtop_step_schedule_seconds": [record.schedule_s],
            "schedtop_step_forward_seconds": [record.forward_s],
        }
        for name, values in singles.items():
            for value in values:
                self.histograms[name].observe(value)
        for gap, times in record.itl:
            self.histograms["vllm:inter_token_latency_seconds"].observe(gap, times)

    def take_events(self, batch: EventBatch) -> None:
        """When this gateway's requests first ran, and how often they were thrown out."""
        if len(self._scheduled_at) > MAX_REMEMBERED:
            self._forget_ended()
        for event in batch.events:
            if event.request_id is None or not self._link.is_live(event.request_id):
                continue
            if event.kind is EventKind.SCHEDULED:
                self._scheduled_at.setdefault(event.request_id, event.mono)
            elif event.kind is EventKind.PREEMPTED:
                self._num_preemptions[event.request_id] += 1

    def take_refusal(self, code: str, message: str) -> None:
        """A request the engine didn't take."""
        for reason in REJECTION_REASONS if code == "queue_full" else ():
            if f" {reason} " in message:
                self.rejections[reason] += 1

    def count_websockets(self, count: int) -> None:
        """Open relays."""
        self.num_websockets = count

    def take_answer(self, answer: Answer, plan: Plan, siblings: Sequence[Answer]) -> None:
        """A finished answer: its sizes, and the times we saw. What is the prompt's counts with its last answer."""
        observe = {
            "vllm:request_prompt_tokens": len(answer.prompt),
            "vllm:request_generation_tokens": answer.num_tokens,
            "vllm:request_params_max_tokens": plan.sampling.max_tokens,
            "vllm:request_prefill_kv_computed_tokens": len(answer.prompt) - answer.num_cached_tokens,
            "vllm:request_num_preemptions": self._num_preemptions.pop(answer.request_id, 0),
            **self._times(answer),
        }
        if all(sibling.finish_reason for sibling in siblings):
            observe["vllm:request_params_n"] = plan.n
            observe["vllm:request_max_num_generation_tokens"] = max(sibling.num_tokens for sibling in siblings)
        for name, value in observe.items():
            self.histograms[name].observe(value)

    def _forget_ended(self) -> None:
        """Drop what is kept of requests that ended without an answer."""
        for kept in (self._scheduled_at, self._num_preemptions):
            for request_id in [request_id for request_id in kept if not self._link.is_live(request_id)]:
                del kept[request_id]

    def _times(self, answer: Answer) -> dict[str, float]:
        scheduled = self._scheduled_at.pop(answer.request_id, answer.submitted_at)
        first, last = answer.first_token_at, answer.last_token_at
        if first is None or last is None:
            return {}
        times = {
            "vllm:request_prefill_time_seconds": max(0.0, first - scheduled),
            "vllm:request_decode_time_seconds": last - first,
            "vllm:request_inference_time_seconds": max(0.0, last - scheduled),
        }
        if answer.num_tokens > 1:
            times["vllm:request_time_per_output_token_seconds"] = (last - first) / (answer.num_tokens - 1)
        return times
