"""The core thread: sleeps when there is nothing to do, wakes for every call, outlives a broken step."""

import threading
from collections.abc import Callable, Iterator

import pytest
from factories import make_request, oracle, split_settings
from scripted import FaultyRunner

from schedtop.engine.core import EngineCore
from schedtop.engine.errors import RequestRefused, SchedtopError
from schedtop.engine.loop import Call, EngineLoop
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.sampling_params import SamplingParams

PATIENCE_S = 30.0


class Watcher:
    """Reads an outbox as the control thread does: parks, and is woken by the core thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.num_wakes = 0
        self._woken = threading.Event()
        loop.wake_watcher = self._wake

    def _wake(self) -> None:
        self.num_wakes += 1
        self._woken.set()

    def next(self) -> Call | EngineCoreOutputs:
        while True:
            if self.loop.outbox:
                return self.loop.outbox.popleft()
            self._woken.clear()
            self.loop.watcher_parked = True
            if not self.loop.outbox:
                assert self._woken.wait(PATIENCE_S), "the core thread never woke its watcher"

    def until(self, holds: Callable[[Call | EngineCoreOutputs], bool]) -> Call | EngineCoreOutputs:
        while not holds(item := self.next()):
            pass
        return item


class CountingCore(EngineCore):
    """Counts how often it was asked for a step."""

    num_calls = 0

    def step(self):
        self.num_calls += 1
        return super().step()


@pytest.fixture
def make_loop() -> Iterator[Callable[..., EngineLoop]]:
    loops: list[EngineLoop] = []

    def make(runner: FaultyRunner | None = None, **settings) -> EngineLoop:
        config, knobs = split_settings(settings)
        loop = EngineLoop(CountingCore(config, runner or FaultyRunner(), knobs))
        loops.append(loop)
        loop.start()
        return loop

    yield make
    for loop in loops:
        loop.stop()
        loop.core.shutdown()
        assert not loop.is_alive


def add(request_id: str = "r", length: int = 20, max_tokens: int = 5) -> Callable[[EngineCore], None]:
    tokens = make_request(request_id, length).token_ids
    return lambda core: core.add_request(request_id, tokens, SamplingParams(max_tokens=max_tokens))


def ended(item: Call | EngineCoreOutputs) -> bool:
    return isinstance(item, EngineCoreOutputs) and any(output.finish_reason for output in item.outputs)


def called(item: Call | EngineCoreOutputs) -> bool:
    return isinstance(item, Call)


def settle(loop: EngineLoop, watcher: Watcher) -> None:
    """Wait until the core thread sleeps: two calls in a row that found no step between them."""
    for _ in range(1000):
        before = loop.core.num_calls
        for _ in range(2):
            loop.submit(lambda core: None)
            watcher.until(called)
        if loop.core.num_calls == before:
            return
    raise AssertionError("the core thread keeps stepping")


def test_a_request_submitted_to_an_idle_engine_is_served(make_loop) -> None:
    loop = make_loop()
    watcher = Watcher(loop)
    loop.submit(add())
    tokens: list[int] = []
    while True:
        item = watcher.next()
        if isinstance(item, EngineCoreOutputs):
            tokens += [token for output in item.outputs for token in output.new_token_ids]
            if ended(item):
                break
    assert tokens == oracle(make_request("r", 20).token_ids, 5)


def test_a_call_comes_back_with_its_result_its_tag_and_the_first_step_that_sees_it(make_loop) -> None:
    loop = make_loop()
    watcher = Watcher(loop)
    call = loop.submit(lambda core: core.set_knobs({"max_num_seqs": 3}).after, tag="t1")
    assert watcher.until(called) is call
    assert (call.result, call.tag, call.error, call.step) == ({"max_num_seqs": 3}, "t1", None, 1)


def test_an_error_of_the_caller_comes_back_with_the_call_and_the_engine_goes_on(make_loop) -> None:
    loop = make_loop(usable=4)
    watcher = Watcher(loop)
    refused = loop.submit(add("big", 65))
    bad = loop.submit(lambda core: core.set_knobs({"max_num_seqs": -1}))
    watcher.until(lambda item: item is bad)
    assert isinstance(refused.error, RequestRefused)
    assert isinstance(bad.error, SchedtopError)
    loop.submit(add())
    watcher.until(ended)


def test_an_idle_engine_sleeps(make_loop) -> None:
    loop = make_loop()
    watcher = Watcher(loop)
    loop.submit(add())
    watcher.until(ended)
    settle(loop, watcher)
    assert not loop.core.has_work


def test_a_head_that_cannot_be_admitted_lets_the_engine_sleep(make_loop) -> None:
    loop = make_loop(usable=10, kv_block_limit=2)
    watcher = Watcher(loop)
    loop.submit(add("stuck", 100))
    settle(loop, watcher)
    assert loop.core.scheduler.num_waiting == 1
    assert not loop.core.has_work
    loop.submit(lambda core: core.set_knobs({"kv_block_limit": 0}))
    watcher.until(ended)


def test_a_full_pause_lets_the_engine_sleep_and_resume_wakes_it(make_loop) -> None:
    loop = make_loop()
    watcher = Watcher(loop)
    loop.submit(lambda core: core.pause("keep"))
    loop.submit(add())
    settle(loop, watcher)
    assert (loop.core.scheduler.num_waiting, loop.core.has_work) == (1, False)
    loop.submit(lambda core: core.resume())
    watcher.until(ended)


def test_release_wakes_an_engine_whose_only_request_was_held(make_loop) -> None:
    loop = make_loop()
    watcher = Watcher(loop)
    loop.submit(lambda core: core.pause("keep"))
    loop.submit(add())
    loop.submit(lambda core: core.hold(["r"]))
    loop.submit(lambda core: core.resume())
    settle(loop, watcher)
    loop.submit(lambda core: core.release(["r"]))
    watcher.until(ended)


def test_an_abort_of_everything_empties_the_gauges_without_further_traffic(make_loop) -> None:
    loop = make_loop()
    watcher = Watcher(loop)
    for index in range(50):
        loop.submit(add(f"r{index}", 20, 1000))
    call = loop.submit(lambda core: core.abort([f"r{index}" for index in range(50)]))
    watcher.until(lambda item: item is call)
    settle(loop, watcher)
    sched = loop.core.scheduler
    assert (len(sched.running), sched.num_waiting, sched.kv.usage().in_use) == (0, 0, 0)


def test_a_broken_step_ends_its_requests_and_the_thread_lives_on(make_loop) -> None:
    runner = FaultyRunner()
    loop = make_loop(runner)
    watcher = Watcher(loop)
    runner.fail_next = True
    loop.submit(add("first"))
    item = watcher.until(ended)
    end = item.outputs[-1]
    assert (end.request_id, end.finish_reason) == ("first", "error")
    assert "the device is gone" in end.detail
    loop.submit(add("second"))
    item = watcher.until(ended)
    assert item.outputs[-1].finish_reason == "length"
    assert loop.is_alive


def test_a_bug_of_ours_ends_the_thread_visibly_and_wakes_the_watcher(make_loop, monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    loop = make_loop()
    woken = threading.Event()
    loop.wake_watcher = woken.set
    loop.submit(lambda core: 1 / 0)
    assert woken.wait(PATIENCE_S)
    assert isinstance(loop.failure, ZeroDivisionError)
    assert not loop.is_alive


def test_the_watcher_is_woken_only_when_it_has_parked_itself(make_loop) -> None:
    loop = make_loop()
    wakes: list[int] = []
    loop.wake_watcher = lambda: wakes.append(1)
    done = threading.Event()
    loop.submit(add("r", 20, 50))
    loop.submit(lambda core: None)
    loop.submit(lambda core: done.set())
    assert done.wait(PATIENCE_S)
    assert wakes == []


def test_stop_ends_the_thread_with_work_left_and_may_be_called_twice(make_loop) -> None:
    loop = make_loop()
    loop.submit(add("r", 20, 4000))
    loop.stop()
    loop.stop()
    assert not loop.is_alive


def test_what_other_threads_post_wakes_a_sleeping_engine(make_loop) -> None:
    loop = make_loop()
    watcher = Watcher(loop)
    settle(loop, watcher)
    done = threading.Event()
    loop.core.post(done.set)
    assert done.wait(PATIENCE_S)
