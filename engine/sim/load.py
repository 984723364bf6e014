"""The loads of a scenario: who arrives when, with how long a prompt and an answer, who shares what, who leaves.

Drawing is deterministic: the same load and seed give the same requests whatever the engine does with them; only when
the clients of a closed loop send them depends on it.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from schedtop.engine.sim.simulate import Arrival, Follow
from schedtop.engine.sim.trace import read_trace

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
MIN_RETRY_S = 1.0
"""Before a client of a closed loop that was refused tries again, at least."""


class Uniform(msgspec.Struct, frozen=True, tag_field="draw", tag="uniform", forbid_unknown_fields=True):
    """Whole numbers from `low` to `high`, each as likely."""

    low: Positive
    high: Positive

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}")


class Lognormal(msgspec.Struct, frozen=True, tag_field="draw", tag="lognormal", forbid_unknown_fields=True):
    """Long-tailed: `median`, with `sigma` of the logarithm, cut to 1 .. `most`."""

    median: Annotated[float, Meta(gt=0)]
    sigma: Annotated[float, Meta(ge=0, le=10)]
    most: Positive


Tokens = Positive | Uniform | Lognormal | Annotated[list[Positive], Meta(min_length=1)]
"""A number of tokens: fixed, drawn (`{draw = "uniform", low = 1, high = 9}`), or one of a list."""
ARRIVALS = ("count", "rate_per_s", "every_s", "clients", "trace")
"""The ways in which requests come, of which a load names one."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one class, from `at_s` to `until_s`."""

    name: str
    prompt: Tokens | None = None
    """Prompt tokens; a trace brings its own."""
    output: Tokens | None = None
    """Tokens of the answer; a trace brings its own."""
    max_tokens: Positive | None = None
    """What clients ask for at most; by default the answer's length. What `reserve_output` reserves."""
    at_s: Seconds = 0.0
    until_s: Seconds | None = None
    count: Count = 0
    """So many at once, at `at_s`."""
    rate_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """A Poisson process."""
    every_s: Seconds = 0.0
    """One (or `burst`) each so many seconds, on the beat."""
    burst: Positive = 1
    """With `every_s`: requests at each beat; with `rate_per_s`: at each arrival."""
    clients: Count = 0
    """A closed loop: so many clients, each of which sends its next request when it has its answer ..."""
    think_s: Seconds = 0.0
    """... after a pause of so long on average (exponential); 0 = at once."""
    trace: str | None = None
    """A CSV file of arrivals, prompt and output lengths (see `trace.py`), beside the scenario's own file."""
    speed: Annotated[float, Meta(gt=0)] = 1.0
    """Play the trace so many times faster."""
    limit: Positive | None = None
    """Take only so many rows of the trace."""
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    shared_prefix: Count = 0
    """Leading prompt tokens that requests of the class have in common ..."""
    prefix_groups: Positive = 1
    """... in so many groups: the requests take turns."""
    abort_after_s: Seconds | None = None
    abort_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of the requests whose client leaves `abort_after_s` after arrival."""

    def __post_init__(self) -> None:
        given = [name for name in ARRIVALS if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"load {self.name!r} must name one of {', '.join(ARRIVALS)}; it names {found}")
        if self.trace is None and (self.prompt is None or self.output is None):
            raise ValueError(f"load {self.name!r} needs prompt and output: numbers of tokens")


def arrivals_of(load: Load, index: int, rng: random.Random, end_s: float | None) -> Iterator[Arrival]:
    """The requests of a load, those of a closed loop by the first of each client. Raises `BadTrace`."""
    end_s = load.until_s if load.until_s is not None else end_s
    if load.trace is not None:
        yield from _from_trace(load, index, rng, end_s)
    elif load.clients:
        for client in range(load.clients):
            yield from _client(load, index, client, random.Random(rng.random()), end_s)
    else:
        for number, at_s in enumerate(_times(load, rng, end_s)):
            yield _draw(load, index, number, at_s, rng)


def has_end(load: Load, horizon_s: float | None) -> bool:
    """Whether the load comes to an end by itself or by a time."""
    return bool(load.count or load.trace) or load.until_s is not None or horizon_s is not None


def _times(load: Load, rng: random.Random, end_s: float | None) -> Iterator[float]:
    if load.count:
        yield from [load.at_s] * load.count
        return
    assert end_s is not None, "checked with the scenario"
    at = load.at_s if load.every_s else load.at_s + rng.expovariate(load.rate_per_s)
    while at < end_s:
        yield from [at] * load.burst
        at += load.every_s or rng.expovariate(load.rate_per_s)


def _client(load: Load, index: int, client: int, rng: random.Random, end_s: float | None) -> Iterator[Arrival]:
    """The first request of a client; each brings the next when it has ended. Yields at most one."""
    num_sent = 0

    def send(at_s: float) -> Arrival | None:
        nonlocal num_sent
        if end_s is not None and at_s >= end_s:
            return None
        number = num_sent * load.clients + client
        num_sent += 1
        return _draw(load, index, number, at_s, rng, follow)

    def follow(ended_s: float, is_refused: bool) -> Arrival | None:
        pause_s = rng.expovariate(1.0 / load.think_s) if load.think_s else 0.0
        return send(ended_s + max(pause_s, MIN_RETRY_S if is_refused else 0.0))

    first = send(load.at_s + (rng.uniform(0.0, load.think_s) if load.think_s else 0.0))
    if first is not None:
        yield first


def _from_trace(load: Load, index: int, rng: random.Random, end_s: float | None) -> Iterator[Arrival]:
    assert load.trace is not None
    for number, row in enumerate(read_trace(Path(load.trace), load.limit).rows):
        at_s = load.at_s + row.at_s / load.speed
        if end_s is not None and at_s >= end_s:
            return
        yield _arrival(load, index, number, at_s, row.num_prompt_tokens, row.num_output_tokens, rng)


def _draw(
    load: Load,
    index: int,
    number: int,
    at_s: float,
    rng: random.Random,
    follow: Follow | None = None,
) -> Arrival:
    assert load.prompt is not None and load.output is not None
    num_prompt, num_output = draw_tokens(load.prompt, rng), draw_tokens(load.output, rng)
    return _arrival(load, index, number, at_s, num_prompt, num_output, rng, follow)


def _arrival(
    load: Load,
    index: int,
    number: int,
    at_s: float,
    num_prompt: int,
    num_output: int,
    rng: random.Random,
    follow: Follow | None = None,
) -> Arrival:
    num_shared = min(load.shared_prefix, num_prompt)
    # Stand-in tokens: equal exactly where prompts are to be equal.
    shared = (index + 1 << 40) + (number % load.prefix_groups << 20)
    own = (index + 1 << 40) + (1 << 39) + number
    leaves = load.abort_after_s is not None and rng.random() < load.abort_share
    return Arrival(
        request_id=f"{load.name}{number}",
        at_s=at_s,
        token_ids=[shared] * num_shared + [own] * (num_prompt - num_shared),
        max_tokens=load.max_tokens or num_output,
        num_output_tokens=num_output if load.max_tokens is not None else None,
        priority=load.priority,
        load=load.name,
        abort_at_s=at_s + load.abort_after_s if leaves and load.abort_after_s is not None else None,
        follow=follow,
    )


def draw_tokens(tokens: Tokens, rng: random.Random) -> int:
    """One number of tokens."""
    match tokens:
        case Uniform():
            return rng.randint(tokens.low, tokens.high)
        case Lognormal():
            return min(tokens.most, max(1, round(tokens.median * rng.lognormvariate(0.0, tokens.sigma))))
        case list():
            return rng.choice(tokens)
        case _:
            return tokens
