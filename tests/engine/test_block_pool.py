"""Free queue, block pool and KV manager: order, references, and random use against a plain model."""

from collections import Counter

import pytest
from factories import make_config, make_request, make_scheduler
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from schedtop.engine.knobs import initial_knobs
from schedtop.engine.kv.block import FreeBlockQueue, KVCacheBlock
from schedtop.engine.kv.block_pool import BlockPool
from schedtop.engine.kv.hashing import block_hash, root_hash
from schedtop.engine.kv.manager import KVCacheManager
from schedtop.engine.request import Request
from schedtop.engine.sampling_params import SamplingParams

QUICK = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_a_free_queue_gives_blocks_from_its_front_and_takes_them_at_its_back() -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(4)]
    queue = FreeBlockQueue(blocks)
    assert queue.popleft() is blocks[0]
    queue.append(blocks[0])
    assert ids(queue) == [1, 2, 3, 0]


def test_any_block_leaves_a_free_queue_from_where_it_stands() -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(4)]
    queue = FreeBlockQueue(blocks)
    for block_id, rest in ((2, [0, 1, 3]), (0, [1, 3]), (3, [1]), (1, [])):
        queue.remove(blocks[block_id])
        assert ids(queue) == rest
    assert queue.num_free == 0


def test_a_group_put_to_the_front_keeps_its_order() -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(5)]
    queue = FreeBlockQueue(blocks[:2])
    queue.prepend_all(blocks[2:])
    assert ids(queue) == [2, 3, 4, 0, 1]


def test_an_empty_queue_gives_nothing() -> None:
    with pytest.raises(AssertionError, match="empty free queue"):
        FreeBlockQueue([]).popleft()


def test_a_block_that_is_not_in_the_queue_cannot_be_removed() -> None:
    queue = FreeBlockQueue([KVCacheBlock(0)])
    with pytest.raises(AssertionError, match="isn't in the free queue"):
        queue.remove(KVCacheBlock(1))


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5, null_block=True)
    assert [block.block_id for block in pool.take(4)] == [1, 2, 3, 4]
    assert (pool.num_usable, pool.num_free) == (4, 0)


def test_unhashed_blocks_of_one_release_go_to_the_front_last_block_foremost() -> None:
    pool = BlockPool(6, null_block=False)
    pool.release(pool.take(3))
    assert [block.block_id for block in pool.take(6)] == [2, 1, 0, 3, 4, 5]


def test_hashed_blocks_go_to_the_back_last_block_first() -> None:
    pool = BlockPool(6, null_block=False)
    blocks = pool.take(3)
    for block in blocks[:2]:
        pool.cache(block, b"%d" % block.block_id)
    pool.release(blocks)
    assert [block.block_id for block in pool.take(6)] == [2, 3, 4, 5, 1, 0]


def test_a_block_with_two_users_is_freed_by_the_second_release() -> None:
    pool = BlockPool(2, null_block=False)
    blocks = pool.take(1)
    pool.cache(blocks[0], b"x")
    pool.touch(blocks)
    assert pool.num_shared == 1
    pool.release(blocks)
    assert (pool.num_free, pool.num_shared) == (1, 0)
    pool.release(blocks)
    assert pool.num_free == 2


def test_a_block_released_once_too_often_is_a_bug_that_shows() -> None:
    pool = BlockPool(2, null_block=False)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often than taken"):
        pool.release(blocks)


def test_of_twins_the_one_cached_first_is_found_and_the_other_when_it_is_gone() -> None:
    pool = BlockPool(3, null_block=False)
    first, second = pool.take(2)
    pool.cache(first, b"x")
    pool.cache(second, b"x")
    assert pool.find(b"x") is first
    pool.uncache(first)
    assert pool.find(b"x") is second
    pool.uncache(second)
    assert pool.find(b"x") is None


def test_a_block_handed_out_again_forgets_what_it_cached() -> None:
    pool = BlockPool(1, null_block=False)
    blocks = pool.take(1)
    pool.cache(blocks[0], b"x")
    pool.release(blocks)
    assert pool.num_cached_free == 1
    pool.take(1)
    assert (pool.find(b"x"), pool.num_cached_free) == (None, 0)


def test_equal_hashes_mean_equal_prefixes_and_equal_keys() -> None:
    root = root_hash(None, None)
    one = block_hash(root, [1, 2])
    assert one == block_hash(root, [1, 2])
    different = [
        block_hash(root, [2, 1]),
        block_hash(one, [1, 2]),
        block_hash(root_hash("a", None), [1, 2]),
        block_hash(root_hash(None, "a"), [1, 2]),
        block_hash(root, [1, 2], ["image"]),
        block_hash(root, [1, 2], ["im", "age"]),
        block_hash(root, [1 + (2 << 32)]),
    ]
    assert len({one, *different}) == 1 + len(different)


class PoolMachine(RuleBasedStateMachine):
    """The pool against sets and counters that are kept the plain way."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + 1, null_block=True)
        self.tables: list[list[KVCacheBlock]] = []
        self.num_hashes = 0

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        if count <= self.pool.num_free:
            front = [block.block_id for block in self.pool._free_queue][:count]
            blocks = self.pool.take(count)
            assert [block.block_id for block in blocks] == front
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0, 99), twin=st.booleans())
    def cache(self, choice: int, twin: bool) -> None:
        for block in self.tables[choice % len(self.tables)]:
            if block.block_hash is None:
                self.num_hashes += not twin
                self.pool.cache(block, b"%d" % self.num_hashes)

    @rule(number=st.integers(0, 20))
    def hit(self, number: int) -> None:
        block = self.pool.find(b"%d" % number)
        if block is not None:
            assert block.block_hash == b"%d" % number
            self.pool.touch([block])
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        self.pool.release(self.tables.pop(choice % len(self.tables)))

    @rule()
    def forget_free(self) -> None:
        self.pool.forget_free()
        assert self.pool.num_cached_free == 0

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0, 99))
    def forget(self, choice: int) -> None:
        for block in self.tables[choice % len(self.tables)]:
            self.pool.forget(block)

    @invariant()
    def books_balance(self) -> None:
        users = Counter(block.block_id for table in self.tables for block in table)
        assert self.pool.faults(dict(users)) == []
        assert self.pool.num_free == self.pool.num_usable - len(users)
        assert self.pool.num_shared == sum(count > 1 for count in users.values())
        letters = Counter(self.pool.states())
        assert letters["s"] + letters["u"] == len(users)
        assert letters["c"] == self.pool.num_cached_free


def test_random_use_of_the_pool_keeps_its_books() -> None:
    run_state_machine_as_test(PoolMachine, settings=QUICK)


class ManagerMachine(RuleBasedStateMachine):
    """Requests that grow, end and come again with prompts of common beginnings."""

    SIZE = 4

    @initialize(num_blocks=st.integers(2, 16), limit=st.integers(0, 4))
    def start(self, num_blocks: int, limit: int) -> None:
        config = make_config(usable=num_blocks, block_size=self.SIZE)
        self.kv = KVCacheManager(config, initial_knobs(config, kv_block_limit=min(limit, num_blocks)))
        self.live: list[Request] = []
        self.pending: list[Request] = []
        self.serial = 0

    @rule(family=st.integers(0, 2), length=st.integers(1, 40))
    def admit(self, family: int, length: int) -> None:
        self.serial += 1
        request = Request(f"r{self.serial}", [family, *range(length - 1)], SamplingParams())
        hits = self.kv.find_prefix(request)
        assert len(hits) * self.SIZE < length
        missing = self.kv.num_blocks_missing(request, length, hits)
        if missing > self.kv.num_free:
            return
        before = self.kv.num_free
        self.kv.adopt(request, hits)
        assert self.kv.grow(request, length) is not None
        assert before - self.kv.num_free == missing
        request.num_computed_tokens = length
        self.kv.hash_full_blocks(request, length)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 9))
    def decode(self, choice: int, count: int) -> None:
        request = self.live[choice % len(self.live)]
        end = request.num_tokens + count
        missing = self.kv.num_blocks_missing(request, end)
        is_short = missing > 0 and missing > self.kv.num_free
        blocks = self.kv.grow(request, end)
        assert (blocks is None) == is_short
        if blocks is None:
            return
        request.token_ids += [1000 + self.serial] * count
        request.num_computed_tokens = end
        self.kv.hash_full_blocks(request, end)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), deferred=st.booleans())
    def free(self, choice: int, deferred: bool) -> None:
        request = self.live.pop(choice % len(self.live))
        request.num_computed_tokens = 0
        before = self.kv.usage()
        self.kv.step += 1
        self.kv.free(request, self.kv.step if deferred else None)
        assert self.kv.usage().free == before.free if deferred else self.kv.usage().free >= before.free

    @rule()
    def settle(self) -> None:
        self.kv.settle(self.kv.step)
        assert self.kv.usage().pending == 0

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), is_ok=st.booleans(), gone=st.booleans())
    def load(self, choice: int, is_ok: bool, gone: bool) -> None:
        request = self.live.pop(choice % len(self.live))
        request.num_computed_tokens = 0
        num_blocks = len(request.blocks)
        self.kv.hold_for_load(request)
        assert self.kv.is_transferring(request.request_id)
        has_blocks = self.kv.end_load(request.request_id, None if gone else request, is_ok)
        assert has_blocks is (is_ok and not gone)
        assert self.kv.end_load(request.request_id, request, is_ok) is None
        assert len(request.blocks) == (num_blocks if has_blocks else 0)
        if has_blocks:
            request.token_ids += [7] * max(0, request.num_slots - request.num_tokens)
            self.live.append(request)

    @rule()
    def reset(self) -> None:
        is_idle = self.kv.pool.num_free == self.kv.pool.num_usable
        assert self.kv.reset() is is_idle
        if is_idle:
            assert self.kv.usage().cached == 0

    @invariant()
    def books_balance(self) -> None:
        assert self.kv.faults(self.live) == []
        usage = self.kv.usage()
        assert usage.free + usage.in_use + usage.held + usage.pending == usage.usable
        assert 0 <= usage.cached <= usage.free
        assert len(self.kv.block_states()) == usage.usable


def test_random_use_of_the_manager_keeps_its_books() -> None:
    run_state_machine_as_test(ManagerMachine, settings=QUICK)


def test_usage_names_blocks_held_for_a_transfer_and_blocks_whose_free_is_pending() -> None:
    sched = make_scheduler(usable=8)
    one, two = make_request("one", 32), make_request("two", 32)
    for request in (one, two):
        sched.kv.grow(request, 32)
    sched.kv.hold_for_send(one)
    sched.kv.free(two, until_step=7)
    usage = sched.kv.usage()
    assert (usage.free, usage.in_use, usage.held, usage.pending) == (4, 0, 2, 2)
    assert "".join(sched.kv.block_states()) == "hhpp...."
    sched.kv.settle(6)
    assert sched.kv.usage().pending == 2
    sched.kv.settle(7)
    assert sched.kv.end_send("one") is True
    assert sched.kv.end_send("one") is False
    assert sched.kv.usage().free == 8
