"""The examples in docs/extending.md are run as they stand there."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.interface import load_scheduler
from schedtop.engine.snapshot import EngineCoreEvent, EventKind, FinishReason

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def make_core(class_name: str, monkeypatch: pytest.MonkeyPatch, runner: FakeRunner, **sizes: Any) -> EngineCore:
    """An engine on the scheduler that an example of the page defines."""
    (source,) = [example for example in EXAMPLES if f"class {class_name}(" in example]
    module = ModuleType("example_of_the_page")
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = EngineConfig(**{"max_num_batched_tokens": 256, **sizes})
    scheduler = load_scheduler(f"{module.__name__}:{class_name}")(config, initial_knobs(config), clock=lambda: 0.0)
    return EngineCore(config, runner, clock=lambda: 0.0, scheduler=scheduler)


def run(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, FinishReason], list[EngineCoreEvent]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    events = []
    while core.has_work:
        done = core.step()
        assert core.self_check() == []
        events += done.events if done else []
        for output in done.outputs if done else ():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    return tokens, ends, events


def test_the_page_has_one_example_for_a_policy_a_victim_rule_and_a_stop_condition() -> None:
    assert len(EXAMPLES) == 3


def test_the_policy_of_the_page_admits_short_prompts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core("ShortestFirst", monkeypatch, FakeRunner(), max_num_seqs=1)
    for length in (90, 20, 50):
        core.add_request(f"p{length}", list(range(length)), SamplingParams(max_tokens=2))
    _, _, events = run(core)
    assert [e.request_id for e in events if e.kind is EventKind.SCHEDULED] == ["p20", "p50", "p90"]


def test_the_victim_rule_of_the_page_spares_who_has_produced_most(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core("SparesTheAdvanced", monkeypatch, FakeRunner(), max_num_seqs=4, num_kv_blocks=7)
    core.add_request("first", list(range(200, 230)), SamplingParams(max_tokens=40))
    core.step()
    core.add_request("second", list(range(30)), SamplingParams(max_tokens=40))
    core.step()
    core.set_priority(["first"], 0)
    for _ in range(4):
        core.step()
    core.preempt(["first"])  # it comes back behind `second` and keeps its output
    _, _, events = run(core)
    victims = [e.request_id for e in events if e.kind is EventKind.PREEMPTED and e.preemption]
    assert victims[-1] == "second"  # the newest is `first`, but it has produced more


def test_the_stop_condition_of_the_page_ends_after_three_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(next_token=lambda tokens: 198 if len(tokens) % 4 == 0 else 7)
    core = make_core("ThreeLines", monkeypatch, runner)
    core.add_request("r", [1, 2, 3], SamplingParams(max_tokens=50))
    tokens, ends, _ = run(core)
    assert ends == {"r": FinishReason.STOP}
    assert tokens["r"].count(198) == 3 and tokens["r"][-1] == 198
