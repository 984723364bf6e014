"""`--scheduler-cls`: other schedulers plan exactly what ours does if they change nothing; bad ones are told why."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import ConfigError
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.kv.connector.attach import attach_store
from schedtop.engine.kv.connector.folder import FolderStore
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.interface import load_scheduler
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.sim.conformance import first_difference, load, replay
from schedtop.engine.snapshot import FinishReason, Viewport

TRACES = sorted((Path(__file__).parents[1] / "conformance" / "traces").glob("*.json"))


class Subclass(Scheduler):
    """Changes nothing."""


class Delegating:
    """Only passes on; whoever sets an attribute from outside would miss the scheduler that plans."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inner = Scheduler(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class NotAScheduler:
    def __init__(self, config: EngineConfig, knobs: Any, *, clock: Any) -> None:
        self.running: list[Any] = []


@pytest.mark.parametrize("make", [Subclass, Delegating], ids=["subclass", "delegating"])
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_scheduler_that_changes_nothing_decides_as_ours(path: Path, make: Any) -> None:
    trace_file = load(path)
    assert first_difference(replay(trace_file.trace, make), trace_file.expect) is None


@pytest.mark.parametrize("name", ["Subclass", "Delegating"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_whole_engine_runs_on_a_loaded_scheduler(
    name: str, is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(num_kv_blocks=12, max_num_seqs=4, max_num_batched_tokens=32)
    module = ModuleType("schedulers_of_a_test")
    monkeypatch.setattr(module, "Mine", globals()[name], raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    runner, now = FakeRunner(), [0.0]
    knobs = initial_knobs(config, async_scheduling=is_async)
    scheduler = load_scheduler("schedulers_of_a_test:Mine")(config, knobs, clock=lambda: now[0])
    core = EngineCore(config, runner, clock=lambda: now[0], scheduler=scheduler)
    attach_store(core, runner, FolderStore(tmp_path, runner.memory.format("fake")))
    for index in range(4):
        core.add_request(f"r{index}", list(range(40)), SamplingParams(max_tokens=30))
    core.pause("keep")
    assert core.step() is not None  # the arrivals' events; nothing is planned
    assert core.snapshot(Viewport()).num_running == 0
    core.resume()
    core.abort(["r3"])
    core.set_knobs({"max_num_seqs": 2})
    ends = {}
    while core.scheduler.requests or core.has_work:
        done = core.step()
        ends |= {output.request_id: output.finish_reason for output in done.outputs} if done else {}
    assert ends == {**dict.fromkeys(("r0", "r1", "r2"), FinishReason.LENGTH), "r3": FinishReason.ABORT}
    assert core.self_check() == [] and core.generation == 1
    core.shutdown()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Scheduler", "isn't written module:Class"),
        ("no_such_module:X", "can't be imported: No module named 'no_such_module'"),
        ("schedtop.engine.sched.scheduler:Schedular", "has no Schedular"),
        ("schedtop.engine.sched.scheduler:UNLIMITED", "UNLIMITED is no class"),
        ("schedtop.engine.sched.queue:RequestQueue", r"called as Class\(config, knobs, clock="),
        ("types:SimpleNamespace", "called as"),
    ],
)
def test_a_scheduler_that_cant_be_loaded_is_told_why(spec: str, message: str) -> None:
    config = EngineConfig()
    with pytest.raises(ConfigError, match=message):
        load_scheduler(spec)(config, initial_knobs(config), clock=lambda: 0.0)


def test_a_class_that_is_no_scheduler_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedtop.engine.sched.scheduler.Mine", NotAScheduler, raising=False)
    config = EngineConfig()
    with pytest.raises(ConfigError, match=r"lacks add_request, apply_knobs, .*waiting: derive it from"):
        load_scheduler("schedtop.engine.sched.scheduler:Mine")(config, initial_knobs(config), clock=lambda: 0.0)
