"""What the scheduler does with blocks that a connector reads or fills, whatever order things come in."""

import zlib
from collections.abc import Sequence
from itertools import permutations

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import SchedulingPolicy, initial_knobs
from schedtop.engine.kv.connector.base import KVConnectorMetadata
from schedtop.engine.request import Request
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched import transfers
from schedtop.engine.snapshot import Viewport


class PromisingConnector:
    """Promises whole prompts to the requests in `loading`, and keeps the blocks of those in `sending`.

    `FakeRunner.block_contents` stays empty for what it "loads": requests that use it need `trusting_runner`.
    """

    def __init__(self, loading: Sequence[str] = (), sending: Sequence[str] = ()) -> None:
        self.loading, self.sending = loading, sending
        self.num_finished: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        return request.num_tokens - num_computed_tokens if request.request_id in self.loading else 0

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduled: Sequence[Request]) -> KVConnectorMetadata | None:
        return None

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        self.num_finished[request.request_id] = self.num_finished.get(request.request_id, 0) + 1
        return request.request_id in self.sending and bool(block_ids)


def trusting_runner() -> FakeRunner:
    """A runner that doesn't check the context: nobody filled the loaded blocks."""
    runner = FakeRunner()
    runner._check_context = lambda request, stop: None  # type: ignore[method-assign]
    return runner


def make_core(
    connector: PromisingConnector, num_blocks: int = 9, is_async: bool = False, **knobs: object
) -> EngineCore:
    config = EngineConfig(num_kv_blocks=num_blocks, max_num_batched_tokens=256, max_num_seqs=8)
    core = EngineCore(
        config, trusting_runner(), initial_knobs(config, async_scheduling=is_async, **knobs), clock=lambda: 0.0
    )
    core.scheduler.connector = connector
    core.scheduler.defers_block_free = True
    return core


def add(core: EngineCore, request_id: str, num_tokens: int, max_tokens: int = 2, priority: int = 0) -> None:
    """A request whose prompt shares nothing with that of any other id."""
    start = zlib.crc32(request_id.encode())
    core.add_request(
        request_id, list(range(start, start + num_tokens)), SamplingParams(max_tokens=max_tokens), priority
    )


def run(core: EngineCore) -> list[str]:
    """Ids in the order in which they end, until nothing can be done without the connector."""
    ended: list[str] = []
    while core.has_work:
        done = core.step()
        ended += [output.request_id for output in done.outputs if output.finish_reason] if done else []
        assert core.self_check() == []
    return ended


OPERATIONS = ("finish", "abort", "abort", "receive done", "send done")


@pytest.mark.parametrize("order", permutations(OPERATIONS), ids="-".join)
def test_blocks_are_freed_exactly_once_whatever_order_ends_and_transfers_come_in(order: tuple[str, ...]) -> None:
    connector = PromisingConnector(loading=["r"], sending=["r"])
    core = make_core(connector)
    add(core, "r", 40)
    run(core)  # the load is under way
    loading, sending = True, False
    for operation in order:
        live_before = "r" in core.scheduler.requests
        match operation:
            case "finish":
                run(core)
            case "abort":
                core.abort(["r"])
            case "receive done":
                core.post(lambda: transfers.load_finished(core.scheduler, "r", True))
                core._read_mail()
                loading = False
            case "send done":
                core.post(lambda: transfers.send_finished(core.scheduler, "r"))
                core._read_mail()
                sending = False
        has_ended = live_before and "r" not in core.scheduler.requests
        # a request that ends while it holds blocks leaves them to its sender; during a load it holds none itself
        sending = sending or (has_ended and not loading)
        is_live = "r" in core.scheduler.requests
        pool = core.snapshot(Viewport()).pool
        assert core.self_check() == []
        assert pool.held == (2 if loading else 3 if sending and has_grown(order) else 2 if sending else 0)
        assert pool.in_use == (2 if is_live and not loading else 0)
    transfers.load_finished(core.scheduler, "r", True)
    run(core)
    transfers.send_finished(core.scheduler, "r")
    run(core)
    assert core.snapshot(Viewport()).pool.free == 8
    assert connector.num_finished == {"r": 1}


def has_grown(order: tuple[str, ...]) -> bool:
    """Whether the request ran (and so has its third block) before anything ended it."""
    return order.index("receive done") < order.index("finish") < order.index("abort")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_finished_load_is_taken_up_whatever_the_head_of_the_queue_is(is_async: bool) -> None:
    core = make_core(PromisingConnector(loading=["low"]), policy=SchedulingPolicy.PRIORITY, is_async=is_async)
    add(core, "low", 64, priority=5)
    run(core)
    add(core, "high", 96, priority=0)
    assert run(core) == []  # 6 blocks needed, 4 held by the load
    core.post(lambda: transfers.load_finished(core.scheduler, "low", True))
    assert run(core) == ["low", "high"]


def test_an_operator_who_holds_a_request_with_loaded_kv_keeps_no_blocks_from_others() -> None:
    core = make_core(PromisingConnector(loading=["held"]))
    add(core, "held", 64)
    run(core)
    core.hold(["held"])
    core.post(lambda: transfers.load_finished(core.scheduler, "held", True))
    add(core, "big", 120)
    assert run(core) == ["big"]
    core.release(["held"])
    run(core)
    core.post(lambda: transfers.load_finished(core.scheduler, "held", True))
    assert run(core) == ["held"]


def test_a_pause_that_keeps_everything_takes_up_loads_and_starts_nothing() -> None:
    core = make_core(PromisingConnector(loading=["r"]))
    add(core, "r", 40)
    run(core)
    core.pause("keep")
    core.post(lambda: transfers.load_finished(core.scheduler, "r", True))
    assert run(core) == []
    core.resume()
    assert run(core) == ["r"]


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_of_an_ended_request_come_back_only_after_the_last_step_that_may_write_them(is_async: bool) -> None:
    """EOS is found in step N with N+1 in flight: a load must not get those blocks before N+1 is done."""
    core = make_core(PromisingConnector(loading=["loads"]), num_blocks=5, is_async=is_async)
    runner = core._runner
    assert isinstance(runner, FakeRunner)
    runner.next_token = lambda tokens: 7 if len(tokens) == 49 else 1
    core._eos_token_ids = (7,)
    loading: list[int] = []

    def check_in_flight(request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        for plan in core.scheduler.in_flight:
            for other in plan.requests:
                assert not set(block_ids) & set(runner.requests[other.request_id].block_ids)
        loading.extend(block_ids)

    core.scheduler.connector.update_state_after_alloc = check_in_flight  # type: ignore[method-assign]
    add(core, "ends", 48, max_tokens=8)
    add(core, "loads", 49)
    assert run(core) == ["ends"]
    assert len(loading) == 3
    core.post(lambda: transfers.load_finished(core.scheduler, "loads", True))
    assert run(core) == ["loads"]
    assert core.snapshot(Viewport()).pool.free == 4


def test_blocks_that_were_sent_come_back_only_after_the_last_step_that_may_write_them() -> None:
    core = make_core(PromisingConnector(sending=["r"]), is_async=True)
    runner = core._runner
    assert isinstance(runner, FakeRunner)
    runner.next_token = lambda tokens: 7 if len(tokens) == 41 else 1
    core._eos_token_ids = (7,)
    add(core, "r", 40, max_tokens=8)
    while "r" in core.scheduler.requests:
        core.step()
    assert len(core.scheduler.in_flight) == 1  # planned before the end was known
    transfers.send_finished(core.scheduler, "r")
    pool = core.snapshot(Viewport()).pool
    assert (pool.held, pool.pending) == (0, 3)
    run(core)
    assert core.snapshot(Viewport()).pool.free == 8
