"""What a server's `/metrics` tells, drawn: for servers without our control socket. Pure; nothing can be changed here.

What isn't exported is said so, never drawn as 0. Percentiles come out of buckets, and each shows the span it lies in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from schedtop.control.vllm.scrape import HISTOGRAMS, NEVER_EXPORTED, Reading
from schedtop.control.vllm.windows import MINUTE_S, NOW_S, Estimate, History, Spread, spread
from schedtop.tui.cells import Line, clean, fit, wrap
from schedtop.tui.format import UNKNOWN, bar, count, duration, rate

SCHEMA = 1
_NAMES = {"ttft": "TTFT", "itl": "ITL", "e2e": "end to end", "queue": "queue time"}
_TOTALS = {
    "generated_tokens": "tokens generated",
    "prompt_tokens": "prompt tokens",
    "preemptions": "preemptions",
    "prefix_cache_hits": "prefix cache hits",
    "prefix_cache_queries": "prefix cache queries",
    "draft_tokens": "draft tokens",
    "accepted_tokens": "draft tokens accepted",
}
NOT_EXPORTED = "not exported by this engine"
HOW_TO_CONTROL = (
    "read-only: a /metrics page has no hands; vLLM gets them with --scheduler-cls "
    "schedtop.control.vllm.plugin.SchedtopScheduler"
)
_BAR = 24


def picture(target: str, histories: Mapping[str, History], trouble: str, width: int) -> list[Line]:
    """All engines of a server. `trouble`: why the numbers are old; empty while they aren't."""
    lines: list[Line] = [((clean(target), "strong"),), *_note(HOW_TO_CONTROL, width)]
    if trouble:
        lines.append(((f"⚠ {clean(trouble)}; what stands below is the past", "bad"),))
    for history in histories.values():
        lines += [(), *engine_lines(history, width)]
    never = f"not on any /metrics page: {', '.join(NEVER_EXPORTED)}"
    return [fit(line, width) for line in [*lines, (), *_note(never, width)]]


def _note(text: str, width: int) -> list[Line]:
    return [((line, "dim"),) for line in wrap(text, width)]


def engine_lines(history: History, width: int) -> list[Line]:
    """One engine."""
    reading = history.newest
    title = f"{reading.kind} engine {clean(reading.engine)}  {clean(reading.model or '')}"
    restarts = f"  restarted {history.num_restarts}x since this began" if history.num_restarts else ""
    lines: list[Line] = [((title, "title"), (restarts, "warn"))]
    lines.append((*_number("running", reading.num_running), *_number("waiting", reading.num_waiting), *_why(reading)))
    lines.append(_pool(reading))
    lines += [_total(history, name) for name in _TOTALS if reading.counters.get(name) is not None]
    for name in HISTOGRAMS:
        lines += _latency(history, name)
    if absent := missing(reading):
        lines += _note(f"{NOT_EXPORTED}: {', '.join(absent)}", width)
    return lines


def missing(reading: Reading) -> list[str]:
    """What this engine could export and doesn't, in words."""
    fields = {"running": reading.num_running, "waiting": reading.num_waiting, "KV usage": reading.kv_usage,
              "waiting by reason": reading.waiting_by_reason, "ends by reason": reading.finished}  # fmt: skip
    counters = {words: reading.counters.get(name) for name, words in _TOTALS.items()}
    latencies = {words: reading.histograms.get(name) for name, words in _NAMES.items()}
    return [name for name, value in {**fields, **counters, **latencies}.items() if value is None]


def _number(name: str, value: float | None) -> Line:
    return ((f"{name} ", "dim"), (f"{UNKNOWN if value is None else count(value):<8}", "strong"))


def _why(reading: Reading) -> Line:
    reasons = reading.waiting_by_reason or {}
    return tuple((f"{clean(name)} {count(value)}  ", "waiting") for name, value in reasons.items() if value)


def _pool(reading: Reading) -> Line:
    if reading.kv_usage is None:
        return (("KV pool ", "dim"), (UNKNOWN, "strong"))
    used = min(1.0, max(0.0, reading.kv_usage))
    size = "" if reading.num_blocks is None else f"  of {count(reading.num_blocks)} blocks of {reading.block_size}"
    strip = bar([(used, "█", "kv_used"), (1 - used, "·", "kv_free")], _BAR)
    return (("KV pool ", "dim"), *strip, (f" {100 * used:.1f}% in use{size}", "text"))


def _total(history: History, name: str) -> Line:
    total = history.newest.counters[name]
    assert total is not None
    minute = history.increase(name, MINUTE_S)
    grown = UNKNOWN if minute is None else count(minute)
    text = f"{count(total):>7} since its start  {grown:>6} in the last minute  {rate(history.rate(name))}/s"
    return ((f"{_TOTALS[name]:<22}", "dim"), (text, "text"))


def _latency(history: History, name: str) -> list[Line]:
    """A line per window; before a window has seen anything, one for the time since the engine's start."""
    buckets = history.newest.histograms.get(name)
    if buckets is None:
        return [((f"{_NAMES[name]:<12}", "dim"), (NOT_EXPORTED, "dim"))]
    parts = [(f"{NOW_S:g} s", history.spread(name, NOW_S)), (f"{MINUTE_S:g} s", history.spread(name, MINUTE_S))]
    if all(part is None for _, part in parts):
        parts = [("all", spread(buckets))]
    labels = [_NAMES[name], *[""] * len(parts)]
    return [
        ((f"{label:<12}{window:<6}", "dim"), (spread_text(part), "text"))
        for label, (window, part) in zip(labels, parts, strict=False)
    ]


def spread_text(part: Spread | None) -> str:
    """Percentiles with the bucket that each lies in."""
    if part is None:
        return UNKNOWN
    return f"p50 {estimate_text(part.p50)}  p90 {estimate_text(part.p90)}  p99 {estimate_text(part.p99)}"


def estimate_text(estimate: Estimate) -> str:
    """A percentile and the span that it lies in.

    >>> estimate_text(Estimate(value=0.15, low=0.1, high=0.2)), estimate_text(Estimate(value=80, low=80, high=None))
    ('150 ms (100 ms to 200 ms)', 'over 1m20s')
    """
    if estimate.high is None:
        return f"over {duration(estimate.low)}"
    low = duration(estimate.low) if estimate.low else "0"
    return f"{duration(estimate.value)} ({low} to {duration(estimate.high)})"


def as_json(target: str, readings: Sequence[Reading]) -> str:
    """One scrape as JSON: what isn't exported is null. Percentiles are over everything since the engine's start."""
    engines: list[dict[str, Any]] = []
    for reading in readings:
        fields = msgspec.to_builtins(msgspec.structs.replace(reading, histograms={}))
        del fields["histograms"]
        latencies = {name: spread(reading.histograms.get(name)) for name in HISTOGRAMS}
        engines.append({**fields, "latencies_since_start": latencies, "not_exported": missing(reading)})
    document = {"schema": SCHEMA, "source": "metrics", "target": target, "read_only": True, "engines": engines,
                "never_exported": list(NEVER_EXPORTED)}  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
