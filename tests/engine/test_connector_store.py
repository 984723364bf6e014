"""A KV connector over a store, with the fake runner: what is loaded, saved, recomputed, and what a failure costs.

All I/O runs where the test says: the executor is worked off by hand, so every interleaving is chosen, none is luck.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import RequestRefused
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.kv.connector.attach import attach_store
from schedtop.engine.runner.fake import FakeRunner, hash_of_prefix
from schedtop.engine.runner.kv_transfer import MAX_PENDING_SAVES
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import FinishReason, Viewport, WaitReason

PROMPT = list(range(100, 148))  # three blocks of 16
OTHER = list(range(500, 548))


class ByHand(Executor):
    """Runs what was submitted when told to; remembers whether it is at it."""

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.is_running = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self, count: int = 1_000_000) -> None:
        while self.jobs and count:
            count -= 1
            self.is_running = True
            self.jobs.popleft()()
            self.is_running = False

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.run()


class MemoryStore:
    """Blocks in a dict. `lost` keys are promised and then not there; asking raises while `is_broken`."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.lost: set[bytes] = set()
        self.is_broken = False
        self.num_puts = 0
        self.allowed: Callable[[], bool] = lambda: True

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        assert self.allowed(), "the store was asked in the engine's thread"
        if self.is_broken:
            raise OSError("gone")
        return next((count for count, key in enumerate(keys) if key not in self.blocks), len(keys))

    def get(self, key: bytes) -> bytes | None:
        assert self.allowed(), "the store was read in the engine's thread"
        if self.is_broken:
            raise OSError("gone")
        return None if key in self.lost else self.blocks.get(key)

    def put(self, key: bytes, content: bytes) -> None:
        assert self.allowed(), "the store was written in the engine's thread"
        if self.is_broken:
            raise OSError("gone")
        self.num_puts += 1
        self.blocks[key] = content

    def close(self) -> None:
        pass


class Engine:
    """An engine with a fake runner over a store."""

    def __init__(self, store: MemoryStore | None, *, is_async: bool = False, num_blocks: int = 101, **knobs: Any):
        config = EngineConfig(
            num_kv_blocks=num_blocks, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512, max_adapters=1
        )
        self.now = 0.0
        self.runner = FakeRunner()
        self.core = EngineCore(
            config, self.runner, initial_knobs(config, async_scheduling=is_async, **knobs), clock=lambda: self.now
        )
        self.reads, self.writes = ByHand(), ByHand()
        if store is not None:
            store.allowed = lambda: self.reads.is_running or self.writes.is_running
            attach_store(self.core, self.runner, store, reads=self.reads, writes=self.writes)
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    def add(self, request_id: str, prompt: list[int], num_tokens: int = 4, **kwargs: Any) -> None:
        self.core.add_request(request_id, prompt, SamplingParams(max_tokens=num_tokens), **kwargs)

    def step(self) -> None:
        self.now += 1.0
        done = self.core.step()
        for output in done.outputs if done else ():
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    def run_steps(self) -> None:
        """Steps until only I/O could bring more."""
        while self.core.has_work:
            self.step()
            assert self.core.self_check() == []

    def run_steps_with_reads(self) -> None:
        """Everything but writing."""
        self.run_steps()
        while self.reads.jobs:
            self.reads.run()
            self.run_steps()

    def run(self) -> dict[str, list[int]]:
        """Everything there is to do, I/O included."""
        self.run_steps()
        while self.reads.jobs or self.writes.jobs:
            self.reads.run()
            self.writes.run()
            self.run_steps()
        return self.outputs

    @property
    def pool(self) -> Any:
        return self.core.snapshot(Viewport()).pool


def expected(prompt: list[int], num_tokens: int = 4) -> list[int]:
    """What the fake model says, without any engine."""
    tokens, next_token = list(prompt), hash_of_prefix()
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def filled_store(*prompts: list[int]) -> MemoryStore:
    """A store after an engine has computed some prompts."""
    store = MemoryStore()
    engine = Engine(store)
    for index, prompt in enumerate(prompts):
        engine.add(f"first-{index}", prompt)
    engine.run()
    return store


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_second_engine_starts_a_known_prompt_from_the_first_ones_blocks(is_async: bool) -> None:
    prompt = [*PROMPT, 7, 8]
    engine = Engine(filled_store(prompt), is_async=is_async)
    engine.add("r", prompt)
    assert engine.run()["r"] == expected(prompt)
    assert engine.runner.num_computed_tokens == len(prompt) - 48 + 3
    assert engine.pool.free == 100


def test_with_every_block_known_the_last_one_is_computed_anyway() -> None:
    engine = Engine(filled_store(PROMPT))
    engine.add("r", PROMPT)
    assert engine.run()["r"] == expected(PROMPT)
    assert engine.runner.num_computed_tokens == 16 + 3


def test_blocks_filled_by_the_output_are_saved_too(is_async: bool) -> None:
    store = MemoryStore()
    engine = Engine(store, is_async=is_async)
    engine.add("r", PROMPT, num_tokens=20)
    output = engine.run()["r"]
    assert output == expected(PROMPT, 20)
    assert len(store.blocks) == 4  # 67 tokens computed: 4 full blocks
    follow_up = Engine(store)
    follow_up.add("next", [*PROMPT, *output])
    assert follow_up.run()["next"] == expected([*PROMPT, *output])
    assert follow_up.runner.num_computed_tokens == 4 + 3


def test_only_what_isnt_cached_here_is_loaded() -> None:
    engine = Engine(filled_store([*PROMPT, 1]))
    engine.add("short", [*PROMPT[:16], 1])
    engine.run()
    loaded: list[int] = []
    write_block = engine.runner.memory.write_block

    def note(block_id: int, content: bytes) -> None:
        loaded.append(block_id)
        write_block(block_id, content)

    engine.runner.memory.write_block = note  # type: ignore[method-assign]
    engine.add("long", [*PROMPT, 1])
    assert engine.run()["long"] == expected([*PROMPT, 1])
    assert len(loaded) == 2


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_a_failed_load_is_recomputed_with_nothing_wrong_left_in_the_cache(is_async: bool, num_lost: int) -> None:
    store = filled_store([*PROMPT, 1])
    store.lost = set(list(store.blocks)[-num_lost:])
    engine = Engine(store, is_async=is_async)
    engine.add("r", [*PROMPT, 1])
    assert engine.run()["r"] == expected([*PROMPT, 1])
    assert engine.runner.num_computed_tokens == 49 + 3
    assert engine.pool.free == 100
    engine.add("again", [*PROMPT, 2])  # hits what was computed here; the fake runner checks every slot it reads
    assert engine.run()["again"] == expected([*PROMPT, 2])


def test_a_failed_load_of_a_prefix_that_two_requests_share_is_recomputed_for_both(is_async: bool) -> None:
    store = filled_store([*PROMPT, 1])
    store.lost = set(store.blocks)
    engine = Engine(store, is_async=is_async)
    engine.add("a", [*PROMPT, 1])
    engine.add("b", [*PROMPT, 2])
    assert engine.run() == {"a": expected([*PROMPT, 1]), "b": expected([*PROMPT, 2])}
    assert engine.pool.free == 100


def test_a_request_behind_a_load_is_served_meanwhile(is_async: bool) -> None:
    engine = Engine(filled_store([*PROMPT, 1]), is_async=is_async)
    engine.add("loads", [*PROMPT, 1])
    engine.add("plain", [1, 2, 3])
    engine.run_steps()
    assert engine.outputs == {"plain": expected([1, 2, 3])}
    assert engine.core.snapshot(Viewport()).waiting[0].wait_reason is WaitReason.KV_TRANSFER
    assert engine.run()["loads"] == expected([*PROMPT, 1])


def test_blocks_of_a_request_aborted_during_its_load_stay_held_until_the_load_has_ended(is_async: bool) -> None:
    engine = Engine(filled_store([*PROMPT, 1]), is_async=is_async)
    engine.add("r", [*PROMPT, 1])
    engine.run_steps()
    engine.reads.run()
    engine.run_steps()
    assert engine.pool.held == 3
    engine.core.abort(["r"])
    engine.run_steps()
    assert engine.ends == {"r": FinishReason.ABORT}
    assert engine.pool.held == 3  # the load still writes there
    with pytest.raises(RequestRefused, match="KV transfer under way"):
        engine.add("r", OTHER)
    engine.run()
    assert (engine.pool.free, engine.pool.held) == (100, 0)
    engine.add("r", [*OTHER, 1])
    assert engine.run()["r"] == expected([*OTHER, 1])


def test_the_answer_for_a_request_that_is_gone_isnt_taken_for_its_namesake() -> None:
    store = filled_store([*PROMPT, 1])
    engine = Engine(store)
    engine.add("r", [*PROMPT, 1])
    engine.run_steps()  # the question is out
    engine.core.abort(["r"])
    engine.add("r", [*OTHER, 1])
    engine.run_steps()
    engine.reads.run(1)  # the first one's answer: 3 blocks
    engine.run_steps()
    assert engine.core.snapshot(Viewport()).num_deferred == 1
    assert engine.run()["r"] == expected([*OTHER, 1])
    assert engine.runner.num_computed_tokens == 49 + 3


def test_an_abort_before_any_block_exists_tells_the_connector_of_no_blocks() -> None:
    engine = Engine(filled_store([*PROMPT, 1]))
    told: list[list[int]] = []
    finished = engine.core.scheduler.connector.request_finished
    engine.core.scheduler.connector.request_finished = (  # type: ignore[method-assign]
        lambda request, block_ids: (told.append(list(block_ids)), finished(request, block_ids))[1]
    )
    engine.add("at once", [*PROMPT, 1])
    engine.core.abort(["at once"])
    engine.add("asking", [*PROMPT, 1])
    engine.run_steps()
    engine.core.abort(["asking"])
    engine.run()
    assert told == [[], []]


def test_a_broken_store_is_a_store_without_blocks(is_async: bool) -> None:
    store = filled_store([*PROMPT, 1])
    store.is_broken = True
    engine = Engine(store, is_async=is_async)
    engine.add("r", [*PROMPT, 1])
    assert engine.run()["r"] == expected([*PROMPT, 1])


def test_a_store_that_breaks_between_answer_and_load_costs_a_recomputation(is_async: bool) -> None:
    store = filled_store([*PROMPT, 1])
    engine = Engine(store, is_async=is_async)
    engine.add("r", [*PROMPT, 1])
    engine.run_steps()
    engine.reads.run()
    store.is_broken = True
    assert engine.run()["r"] == expected([*PROMPT, 1])
    assert engine.pool.free == 100


def test_a_prefix_shared_by_many_requests_is_saved_once() -> None:
    store = MemoryStore()
    engine = Engine(store)
    for index in range(6):
        engine.add(f"r{index}", [*PROMPT, index])
    engine.run()
    assert store.num_puts == 3


def test_a_slow_store_costs_saves_and_not_memory() -> None:
    store = MemoryStore()
    engine = Engine(store, num_blocks=MAX_PENDING_SAVES + 100)
    for index in range(MAX_PENDING_SAVES // 3 + 3):
        engine.add(f"r{index}", [index, *PROMPT], num_tokens=1)
    engine.run_steps_with_reads()
    assert len(engine.writes.jobs) == MAX_PENDING_SAVES
    engine.run()
    assert store.num_puts == MAX_PENDING_SAVES


def test_adapters_share_no_blocks_through_a_store() -> None:
    store = filled_store([*PROMPT, 1])
    engine = Engine(store)
    engine.add("r", [*PROMPT, 1], adapter="x")
    engine.run()
    assert (store.num_puts, engine.runner.num_computed_tokens) == (3, 52)


def test_a_preempted_request_loads_again_and_its_output_is_the_same(is_async: bool) -> None:
    engine = Engine(filled_store([*PROMPT, 1]), is_async=is_async)
    engine.add("r", [*PROMPT, 1], num_tokens=12)
    while not engine.outputs:
        engine.reads.run()
        engine.step()
    engine.core.preempt(["r"])
    engine.core.reset_prefix_cache()
    assert engine.run()["r"] == expected([*PROMPT, 1], 12)


def test_prompt_is_at_least_cached_is_at_least_external() -> None:
    engine = Engine(filled_store([*PROMPT, 1]))
    engine.add("short", [*PROMPT[:16], 1])
    engine.run()
    engine.add("r", [*PROMPT, 1], num_tokens=8)
    while "r" not in engine.outputs:
        engine.reads.run()
        engine.step()
    engine.core.preempt(["r"])
    engine.run()
    counters = engine.core.snapshot(Viewport()).counters
    # `short` hit 16 tokens of the store, `r` 16 here and 32 of the store; its second start counts apart
    assert (counters.prompt_tokens, counters.prefix_cache_hits, counters.external_cache_hits) == (66, 64, 48)
    assert counters.external_cache_queries == 66 - 16
    assert counters.resumed_cache_hits > 0


def test_nothing_computed_over_a_broken_step_reaches_the_store() -> None:
    """Chunk 1 breaks while chunk 2 is already planned: chunk 2 computes on nothing and must not be saved."""
    store = MemoryStore()
    engine = Engine(store, is_async=True)
    run_step, steps = engine.runner._run_step, []

    def break_the_first(output: Any) -> Any:
        if output.num_scheduled_tokens:
            steps.append(output.step)
            if len(steps) == 1:
                raise RuntimeError("kernel")
        engine.runner.block_contents.clear()
        engine.runner._check_context = lambda request, stop: None  # type: ignore[method-assign]
        return run_step(output)

    engine.runner._run_step = break_the_first  # type: ignore[method-assign]
    engine.add("r", [*PROMPT, *OTHER, 1])
    engine.run()
    assert engine.ends == {"r": FinishReason.ERROR}
    assert len(steps) > 1 and store.num_puts == 0
