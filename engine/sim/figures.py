"""The figures of the papers that this scheduler stands on, in shape: swept scenarios, one number per point.

Sarathi-Serve (Agrawal et al. 2024): at a fixed limit for token gaps, capacity against chunk size has a hump.
Orca (Yu et al. 2022): batches that form anew in every iteration against batches of whole requests.
PagedAttention (Kwon et al. 2023): KV memory given out as it is needed against memory reserved for the longest answer.
Last, our own question: what a preemption throws away, by pool size and victim rule.
All step times are `PAPER_MODEL`'s; the machines of the papers aren't modelled, so only shapes can be compared.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.load import Load, Lognormal, Uniform
from schedtop.engine.sim.scenario import Scenario, StepTime
from schedtop.engine.sim.simulate import SimulationResult
from schedtop.engine.sim.summary import percentile, pooled_gaps

STEP_TIME = StepTime(base_ms=8, per_sequence_ms=0.06, per_prefill_token_ms=0.02)
GAP_LIMIT_S = 0.05
TTFT_LIMIT_S = 2.0
NUM_HALVINGS = 5


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a figure."""

    label: str
    points: list[tuple[float, float]]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """What was swept, what was measured, and how it came out."""

    name: str
    title: str
    x: str
    y: str
    curves: list[Curve]


def scenario(load: Load, engine: Mapping[str, int], horizon_s: float, batching: str = "iteration") -> Scenario:
    """A scenario of one load on a plain engine."""
    sizes = {"max_num_batched_tokens": 16_384, "max_num_seqs": 256, "max_model_len": 16_384, "num_kv_blocks": 8000}
    return Scenario(
        name=load.name,
        description="a point of a figure",
        step_time=STEP_TIME,
        load=[load],
        engine={**sizes, **engine},
        horizon_s=horizon_s,
        batching="request" if batching == "request" else "iteration",
    )


def _run(loaded: Scenario, knobs: Mapping[str, KnobValue], seed: int) -> SimulationResult:
    return loaded.simulation(dict(knobs), seed).run(loaded.horizon_s)


# ---- Sarathi-Serve ----------------------------------------------------------------------------------------------

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def chunk_size(seed: int = 0, chunks: Sequence[int] = CHUNKS, horizon_s: float = 30.0) -> Figure:
    """Capacity at a p99 token gap of at most `GAP_LIMIT_S`, against the chunk size (the token budget).

    Small chunks waste the fixed cost of a step, large ones stretch the gaps of those that decode beside them.
    """
    points = [(float(chunk), _capacity(chunk, seed, horizon_s)) for chunk in chunks]
    return Figure(
        name="chunk-size",
        title=f"Requests a second served with p99 token gap <= {GAP_LIMIT_S * 1e3:g} ms, by chunk size",
        x="chunk, tokens",
        y="requests/s",
        curves=[Curve(label="chunked prefill", points=points)],
    )


def _capacity(chunk: int, seed: int, horizon_s: float) -> float:
    """The highest rate that still meets both limits, by halving."""
    low, high = 0.0, 16.0
    for _ in range(NUM_HALVINGS):
        rate = (low + high) / 2
        load = Load(
            name="mixed",
            rate_per_s=rate,
            prompt=Lognormal(median=2000, sigma=0.7, most=12_000),
            output=Uniform(low=100, high=300),
        )
        result = _run(scenario(load, {}, horizon_s), {"max_num_batched_tokens": chunk}, seed)
        low, high = (rate, high) if _meets_limits(result) else (low, rate)
    return low


def _meets_limits(result: SimulationResult) -> bool:
    """Median wait and p99 gap within their limits; who never got a token has waited until the end."""
    outcomes = list(result.outcomes.values())
    waits = sorted(o.ttft_s if o.token_times else result.makespan_s - o.arrival.at_s for o in outcomes)
    gaps = pooled_gaps(outcomes)
    if not gaps:
        return False
    return percentile(waits, 0.5) <= TTFT_LIMIT_S and percentile(gaps, 0.99) <= GAP_LIMIT_S


# ---- Orca -------------------------------------------------------------------------------------------------------


def batching(seed: int = 0, rates: Sequence[float] = (1, 2, 4, 8, 12, 16, 24), horizon_s: float = 30.0) -> Figure:
    """Median latency per output token against the rate: batches formed per iteration, and per request."""
    return Figure(
        name="batching",
        title="Median latency per output token by load: iteration-level against request-level batching",
        x="requests/s",
        y="ms per output token",
        curves=[
            Curve(label=f"{kind} level", points=[(rate, _latency_ms(rate, kind, seed, horizon_s)) for rate in rates])
            for kind in ("iteration", "request")
        ],
    )


def _latency_ms(rate: float, kind: str, seed: int, horizon_s: float) -> float:
    load = Load(
        name="mixed",
        rate_per_s=rate,
        until_s=horizon_s,
        prompt=Uniform(low=32, high=512),
        output=Uniform(low=1, high=128),
    )
    loaded = msgspec.structs.replace(scenario(load, {"max_num_seqs": 32}, horizon_s, kind), horizon_s=None)
    result = _run(loaded, {"max_num_seqs": 32}, seed)
    return percentile(sorted(_latencies_per_token(result)), 0.5) * 1e3


def _latencies_per_token(result: SimulationResult) -> list[float]:
    """Seconds from arrival to the last token, by tokens, of each request."""
    return [(o.token_times[-1] - o.arrival.at_s) / len(o.token_times) for o in result.outcomes.values()]


# ---- PagedAttention ---------------------------------------------------------------------------------------------


def memory(seed: int = 0, rates: Sequence[float] = (1, 2, 4, 6, 8, 12, 16), horizon_s: float = 30.0) -> Figure:
    """Mean latency per output token against the rate: blocks given out as needed, or reserved for what may come."""
    kinds: dict[str, tuple[Mapping[str, KnobValue], bool]] = {
        "paged": ({}, True),
        "reserved for what was asked for": ({"reserve_output": True}, True),
        "reserved for the real length": ({"reserve_output": True}, False),
    }
    return Figure(
        name="memory",
        title="Mean latency per output token by load: paged against reserved KV memory",
        x="requests/s",
        y="ms per output token",
        curves=[
            Curve(label=label, points=[(rate, _mean_latency_ms(rate, *kind, seed, horizon_s)) for rate in rates])
            for label, kind in kinds.items()
        ],
    )


def _mean_latency_ms(
    rate: float, knobs: Mapping[str, KnobValue], asks_for_more: bool, seed: int, horizon_s: float
) -> float:
    load = Load(
        name="mixed",
        rate_per_s=rate,
        until_s=horizon_s,
        prompt=Uniform(low=50, high=300),
        output=Uniform(low=50, high=300),
        max_tokens=2000 if asks_for_more else None,
    )
    loaded = msgspec.structs.replace(scenario(load, {"num_kv_blocks": 1001}, horizon_s), horizon_s=None)
    return statistics.fmean(_latencies_per_token(_run(loaded, knobs, seed))) * 1e3


# ---- what a preemption throws away ------------------------------------------------------------------------------

POOLS = (600, 800, 1000, 1400, 1800, 2400)
VICTIMS = ("newest", "least_computed", "most_blocks")


def thrown_away(seed: int = 0, pools: Sequence[int] = POOLS, num_requests: int = 48) -> Figure:
    """Tokens computed for nothing, per token answered, against the size of the pool, by victim rule."""
    return Figure(
        name="thrown-away",
        title="Tokens thrown away per output token, by pool size and victim rule",
        x="KV blocks",
        y="tokens thrown away per output token",
        curves=[
            Curve(label=victim, points=[(float(pool), _waste(pool, victim, seed, num_requests)) for pool in pools])
            for victim in VICTIMS
        ],
    )


def _waste(pool: int, victim: str, seed: int, num_requests: int) -> float:
    load = Load(name="writer", count=num_requests, prompt=Uniform(low=100, high=700), output=Uniform(low=100, high=700))
    loaded = msgspec.structs.replace(scenario(load, {"num_kv_blocks": pool + 1}, 1.0), horizon_s=None)
    result = _run(loaded, {"victim": victim, "prefix_caching": False}, seed)
    return result.num_lost_tokens / sum(len(outcome.token_times) for outcome in result.outcomes.values())


FIGURES: dict[str, Callable[[int], Figure]] = {
    "chunk-size": chunk_size,
    "batching": batching,
    "memory": memory,
    "thrown-away": thrown_away,
}
