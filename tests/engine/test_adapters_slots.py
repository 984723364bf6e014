"""Adapter slots: a bound on how many adapters run at once that starves nobody and holds up nobody else."""

import random

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import RequestRefused
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import Viewport, WaitReason


class Engine:
    def __init__(self, num_slots: int = 1, is_async: bool = False, **knobs: object) -> None:
        config = EngineConfig(num_kv_blocks=501, max_num_seqs=64, max_num_batched_tokens=512, max_adapters=num_slots)
        self.core = EngineCore(
            config, FakeRunner(), initial_knobs(config, async_scheduling=is_async, **knobs), clock=lambda: 0.0
        )
        self.num_slots = num_slots
        self.started: list[str] = []
        self.ended: list[str] = []

    def add(self, request_id: str, adapter: str | None, max_tokens: int = 3) -> None:
        self.core.add_request(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens), adapter=adapter)

    def step(self) -> None:
        done = self.core.step()
        assert self.core.self_check() == []
        for request in self.core.scheduler.running:
            if request.request_id not in self.started:
                self.started.append(request.request_id)
        adapters = {request.adapter for request in self.core.scheduler.running} - {None}
        assert len(adapters) == self.core.scheduler.adapters.num_in_use <= self.num_slots
        self.ended += [output.request_id for output in done.outputs if output.finish_reason] if done else []

    def run(self) -> None:
        while self.core.has_work:
            self.step()


@pytest.mark.parametrize("max_bypass", [0, 3, 8])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_of_one_adapter_cant_starve_another(is_async: bool, max_bypass: int) -> None:
    engine = Engine(is_async=is_async, max_bypass=max_bypass)
    engine.add("a0", "a", max_tokens=4)
    engine.step()
    engine.add("b", "b")
    for index in range(1, 40):
        engine.add(f"a{index}", "a", max_tokens=4)
        engine.step()
    engine.run()
    assert engine.started.index("b") == 1 + max_bypass
    assert len(engine.ended) == 41


def test_requests_of_an_adapter_that_runs_and_plain_ones_pass_one_that_waits_for_a_slot() -> None:
    engine = Engine()
    for request_id, adapter in (("a0", "a"), ("b", "b"), ("a1", "a"), ("plain", None)):
        engine.add(request_id, adapter)
    engine.step()
    assert engine.started == ["a0", "a1", "plain"]
    row = engine.core.snapshot(Viewport()).waiting[0]
    assert (row.wait_reason, row.wait_detail) == (WaitReason.ADAPTER_SLOTS, "adapter b")
    engine.run()
    assert engine.ended[-1] == "b"


@pytest.mark.parametrize("end", ["abort", "hold"])
def test_who_stood_behind_a_starved_request_moves_up_when_it_leaves(end: str) -> None:
    engine = Engine(max_bypass=0)
    engine.add("a0", "a", max_tokens=50)
    engine.add("b", "b")
    engine.add("a1", "a")
    engine.step()
    assert engine.started == ["a0"]
    getattr(engine.core, end)(["b"])
    engine.step()
    assert engine.started == ["a0", "a1"]
    engine.core.release(["b"])
    engine.run()
    assert "b" in engine.ended or end == "abort"


def test_when_a_slot_is_free_all_who_wait_for_the_same_adapter_get_in() -> None:
    engine = Engine()
    engine.add("a", "a")
    for index in range(5):
        engine.add(f"b{index}", "b")
    engine.run()
    assert engine.started == ["a", "b0", "b1", "b2", "b3", "b4"]
    assert engine.ended == engine.started


def test_an_engine_without_slots_refuses_adapters() -> None:
    with pytest.raises(RequestRefused, match="without adapter slots"):
        Engine(num_slots=0).add("r", "a")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_mix_of_adapters_everybody_ends(is_async: bool, seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(num_slots=rng.choice([1, 2, 3]), is_async=is_async, max_bypass=rng.choice([0, 2, 8]))
    names = set()
    for index in range(60):
        names.add(f"r{index}")
        engine.add(f"r{index}", rng.choice([None, *"abcdef"]), max_tokens=rng.randrange(1, 8))
        if rng.random() < 0.5 and engine.core.has_work:
            engine.step()
        chosen = [f"r{rng.randrange(index + 1)}"]
        match rng.randrange(12):
            case 0:
                engine.core.abort(chosen)
            case 1:
                engine.core.preempt(chosen)
            case 2:
                engine.core.hold(chosen)
            case 3:
                engine.core.release(chosen)
    engine.core.release(list(engine.core.scheduler.requests))
    engine.run()
    assert engine.core.snapshot(Viewport()).num_waiting == 0
    assert set(engine.ended) == names and len(engine.ended) == len(names)
