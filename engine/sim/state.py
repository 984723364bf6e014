"""The whole scheduling state of a live engine, frozen: what a forecast starts from.

`capture` reads it off a scheduler, `restore` builds an equal scheduler from it. Tokens are not carried, only who shares
which cached prefix: two requests share a block's content exactly when they name the same content number.
"""

from collections.abc import Callable

import msgspec

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import Knobs
from schedtop.engine.request import Request, State
from schedtop.engine.runner.simulated import END_TOKEN
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.explain import in_schedule_order
from schedtop.engine.sched.interface import SchedulerInterface
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.snapshot import PauseState

MAX_REQUESTS = 20_000
"""Waiting requests carried at most: those behind them don't run within any horizon one would ask for."""


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """One live request. `contents` numbers the content of its full known blocks, as far as they are hashed."""

    request_id: str
    is_running: bool
    was_admitted: bool
    is_held: bool
    priority: int
    arrived: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    num_computed_tokens: int
    contents: list[int]
    num_preemptions: int = 0
    adapter: str | None = None


class ArrivalSample(msgspec.Struct, frozen=True, array_like=True):
    """A request that came: when (engine clock, seconds), how long its prompt, how urgent.

    `contents` numbers the leading blocks of its prompt that others share with it, as in `RequestState`.
    """

    at: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    contents: list[int] = []


class EndSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that ended by itself: when (engine clock, seconds), of what kind it was, with how many tokens."""

    at: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    num_output_tokens: int


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the scheduler's next decisions depend on, and what is known of the load."""

    mono: float
    step: int
    config: EngineConfig
    knobs: Knobs
    pause: PauseState
    requests: list[RequestState]
    """Running ones in admission order, then the waiting in schedule order."""
    num_left_out: int = 0
    arrivals: list[ArrivalSample] = []
    """The most recent arrivals, oldest first."""
    ends: list[EndSample] = []
    """The requests that ended most recently by themselves, oldest first."""
    cached: list[list[int]] = []
    """Contents of shared prefixes that lie in the cache and that nobody live holds, least recently used first."""


def capture(sched: SchedulerInterface) -> EngineState:
    """The state of a live scheduler at a step boundary."""
    numbers: dict[bytes, int] = {}
    waiting = list(in_schedule_order(sched))
    requests = [_request_state(request, numbers) for request in [*sched.running, *waiting[:MAX_REQUESTS]]]
    prefixes = _shared_prefixes(sched, requests, numbers)
    return EngineState(
        mono=sched.clock(),
        step=sched.step,
        config=sched.config,
        knobs=sched.knobs,
        pause=sched.pause_state,
        requests=requests,
        num_left_out=max(0, len(waiting) - MAX_REQUESTS),
        arrivals=[ArrivalSample(*sample, contents=prefixes.of(sample)) for sample in sched.stats.recent_arrivals],
        ends=[EndSample(*sample) for sample in sched.stats.recent_ends],
        cached=prefixes.cached,
    )


class _Prefixes(msgspec.Struct):
    """What the recently admitted requests had in common, by the first block of their prompt."""

    by_kind: dict[tuple[int, int, int], list[int]]
    """(prompt tokens, max_tokens, priority) -> leading contents that such a request shares with others."""
    cached: list[list[int]]

    def of(self, sample: tuple[float, int, int, int]) -> list[int]:
        """The shared contents of an arrival."""
        return self.by_kind.get(sample[1:], [])


def _shared_prefixes(sched: SchedulerInterface, requests: list[RequestState], numbers: dict[bytes, int]) -> _Prefixes:
    """A request that found nothing cached was the first of its group: the next like it will find what others found."""
    size = sched.config.block_size
    live = {saved.contents[0]: saved.contents for saved in requests if saved.contents}
    deepest: dict[bytes, int] = {}
    for *_, first, num_hit_tokens in sched.stats.recent_hits:
        deepest[first] = max(deepest.get(first, 0), num_hit_tokens // size)
    chains = {}
    for first, num_blocks in deepest.items():
        number = numbers.setdefault(first, len(numbers))
        known = live.get(number, [number])[:num_blocks]
        chains[first] = known + [_unnamed(number, index) for index in range(len(known), num_blocks)]
    by_kind = {
        (prompt, max_tokens, priority): chains[first][: (num_hit_tokens or prompt - 1) // size]
        for prompt, max_tokens, priority, first, num_hit_tokens in sched.stats.recent_hits
    }
    pool = sched.kv.pool
    idle = [first for first in chains if numbers[first] not in live and pool.find(first) is not None]
    return _Prefixes(by_kind, [chains[first] for first in idle])


def _unnamed(group: int, index: int) -> int:
    """A number for a block of a prefix that nobody live holds: no other content has it."""
    return (group + 1 << 24) + index


def _request_state(request: Request, numbers: dict[bytes, int]) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        is_running=request.state is State.RUNNING,
        was_admitted=request.was_admitted,
        is_held=request.is_held,
        priority=request.priority,
        arrived=request.arrived,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_output_tokens=request.max_total_tokens - request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens - request.num_output_placeholders,
        contents=[numbers.setdefault(content, len(numbers)) for content in request.block_hashes],
        num_preemptions=request.num_preemptions,
        adapter=request.adapter,
    )


def restore(state: EngineState, knobs: Knobs, clock: Callable[[], float]) -> Scheduler:
    """A scheduler in the captured state under other knobs; every request stops at `END_TOKEN`.

    Running requests keep their order and their computed context. If `knobs` leave them too few blocks, they are
    preempted by the rules in the first step.
    """
    sched = Scheduler(state.config, knobs, clock=clock)
    sched.set_pause(state.pause)
    for contents in state.cached:
        _cache(sched, contents)
    for saved in state.requests:
        request = _request_from(saved, state.config.block_size)
        sched.add_request(request)
        request.arrived = saved.arrived
        request.was_admitted = saved.was_admitted
        request.num_preemptions = saved.num_preemptions
        if saved.num_output_tokens:
            request.first_token_at = request.last_token_at = state.mono
        if saved.is_running:
            _resume_running(sched, request, saved)
        elif saved.is_held:
            sched.hold(request)
    sched.stats.take_events()
    sched.stats.take_samples()
    return sched


def _cache(sched: Scheduler, contents: list[int]) -> None:
    """Leave a prefix in the cache that nobody holds."""
    tokens = stand_in_tokens(contents, sched.config.block_size)
    holder = Request("", tokens, SamplingParams(max_tokens=1))
    sched.kv.adopt(holder, [])
    if sched.kv.grow(holder, len(tokens)) is not None:
        sched.kv.hash_full_blocks(holder, len(tokens))
        sched.kv.free(holder)


def stand_in_tokens(contents: list[int], block_size: int) -> list[int]:
    """Tokens of blocks with these contents: equal exactly where the contents are."""
    return [content for content in contents for _ in range(block_size)]


def _request_from(saved: RequestState, block_size: int) -> Request:
    """A request with stand-in tokens: equal where the contents are known to be equal, else its own."""
    num_known = saved.num_prompt_tokens + saved.num_output_tokens
    own = -1 - (hash(saved.request_id) & 0xFFFFFFFF)
    tokens = stand_in_tokens(saved.contents, block_size)[:num_known]
    tokens += [own] * (num_known - len(tokens))
    request = Request(
        saved.request_id,
        tokens[: saved.num_prompt_tokens],
        SamplingParams(
            max_tokens=max(saved.max_output_tokens, saved.num_output_tokens + 1),
            ignore_eos=True,
            stop_token_ids=(END_TOKEN,),
        ),
        priority=saved.priority,
        arrival_time=saved.arrived,
        adapter=saved.adapter,
    )
    request.token_ids = tokens
    return request


def _resume_running(sched: Scheduler, request: Request, saved: RequestState) -> None:
    sched.leave_queue(request)
    hits = sched.kv.find_prefix(request)[: saved.num_computed_tokens // sched.config.block_size]
    sched.kv.adopt(request, hits)
    sched.kv.grow(request, saved.num_computed_tokens)
    request.num_computed_tokens = saved.num_computed_tokens
    sched.kv.hash_full_blocks(request, saved.num_computed_tokens)
    sched.start_running(request, 0)
