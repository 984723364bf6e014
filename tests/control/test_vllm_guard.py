"""What keeps the plugin honest without a vLLM at hand: the guard, the books, and a core that can't drift from ours."""

import ast
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import schedtop.control
from schedtop.control.messages import AnyCommand
from schedtop.control.server import CAPABILITIES
from schedtop.control.vllm import guard
from schedtop.control.vllm.engine import VllmEngine
from schedtop.control.vllm.watch import Books, Counts, PlannedStep
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import VLLM, change_knobs, initial_knobs, knob_table
from schedtop.engine.snapshot import EventKind, Preemption

CONTROL = Path(schedtop.control.__file__).parent
NOT_OF_A_VLLM = {"add_request", "clock", "shutdown"}
"""Of what control calls on a core: requests (and their times) come through vLLM's front end, and vLLM ends itself."""
CONTROL_FILES = ("operations.py", "commands.py", "changes.py", "server.py", "watchers.py", "connection.py")


def set_path(target: Any, path: str, value: Any = 1) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(target, parent):
            setattr(target, parent, SimpleNamespace())
        target = getattr(target, parent)
    if not hasattr(target, name):
        setattr(target, name, value)


def fake_scheduler(without: str | None = None) -> Any:
    """An object with every attribute the plugin uses, but one."""
    needs = [
        *guard.NEEDED,
        *guard.SHOWN_LESS,
        *sum(guard.KNOB_NEEDS.values(), ()),
        *sum(guard.COMMAND_NEEDS.values(), ()),
    ]
    scheduler = SimpleNamespace()
    for path in sorted(set(needs), key=len, reverse=True):  # parents last: they are made for their attributes
        set_path(scheduler, path)
    if without is not None:
        *parents, name = without.split(".")
        owner = scheduler
        for parent in parents:
            owner = getattr(owner, parent)
        delattr(owner, name)
    return scheduler


TABLE = knob_table(EngineConfig(num_kv_blocks=101))


def usable(scheduler: Any) -> tuple[set[str], set[str], list[str]]:
    said: list[str] = []
    knobs = {spec.name for spec in guard.usable_knobs(scheduler, TABLE, said.append)}
    return knobs, set(guard.usable_commands(scheduler, said.append)), said


def test_a_whole_scheduler_loses_nothing() -> None:
    knobs, commands, said = usable(fake_scheduler())
    assert guard.missing(fake_scheduler()) == []
    assert knobs == set(guard.KNOB_NEEDS) == {spec.name for spec in knob_table(EngineConfig()) if VLLM in spec.engines}
    assert commands == {*guard.COMMAND_NEEDS, *guard.ALWAYS}
    assert said == []


def test_a_knob_that_only_other_engines_have_is_refused_as_such() -> None:
    table = tuple(spec for spec in knob_table(EngineConfig()) if VLLM in spec.engines)
    with pytest.raises(SchedtopError, match="this engine has no knob victim, other kinds have it"):
        change_knobs(initial_knobs(EngineConfig()), {"victim": "most_blocks"}, table)


@pytest.mark.parametrize("path", sorted({path for needs in guard.KNOB_NEEDS.values() for path in needs}))
def test_a_missing_attribute_turns_off_its_knobs_and_says_which_and_why(path: str) -> None:
    knobs, _, said = usable(fake_scheduler(without=path))
    lost = {name for name, needs in guard.KNOB_NEEDS.items() if path in needs}
    assert knobs == set(guard.KNOB_NEEDS) - lost
    for name in lost:
        assert any(line.startswith(f"knob {name} is off") and path in line for line in said)


@pytest.mark.parametrize("path", sorted({path for needs in guard.COMMAND_NEEDS.values() for path in needs}))
def test_a_missing_method_turns_off_its_commands_and_says_which_and_why(path: str) -> None:
    _, commands, said = usable(fake_scheduler(without=path))
    lost = {name for name, needs in guard.COMMAND_NEEDS.items() if path in needs}
    assert lost
    assert not commands & lost
    for name in lost:
        assert any(line.startswith(f"{name} is off") and path in line for line in said)


@pytest.mark.parametrize("path", guard.SHOWN_LESS)
def test_what_watchers_miss_is_said(path: str) -> None:
    _, _, said = usable(fake_scheduler(without=path))
    assert any(line.startswith(guard.SHOWN_LESS[path]) and path in line for line in said)


@pytest.mark.parametrize("path", guard.NEEDED)
def test_without_a_vital_attribute_there_is_no_control_at_all(path: str) -> None:
    assert path in guard.missing(fake_scheduler(without=path))


def test_every_command_is_either_guarded_or_vllms_own_business() -> None:
    assert {*guard.COMMAND_NEEDS, *guard.ALWAYS} == set(CAPABILITIES) - {"AddRequest"}
    assert AnyCommand


# ---- the same methods as our core ----------------------------------------------------------------------------


def methods_of_vllm_core() -> dict[str, ast.FunctionDef | ast.AnnAssign | None]:
    tree = ast.parse((CONTROL / "vllm" / "core.py").read_text())
    (core,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "VllmCore")
    found: dict[str, Any] = {node.name: node for node in core.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(found["__init__"]):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found.setdefault(node.attr, None)
    return found


def names_used_on_a_core() -> set[str]:
    used = set()
    for name in CONTROL_FILES:
        for node in ast.walk(ast.parse((CONTROL / name).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "core":
                used.add(node.attr)
    return used


def test_whatever_control_calls_on_a_core_a_vllm_core_has() -> None:
    used = names_used_on_a_core()
    assert {"set_knobs", "snapshot", "abort", "state"} <= used
    assert used - NOT_OF_A_VLLM - set(methods_of_vllm_core()) == set()


@pytest.mark.parametrize("name", sorted(names_used_on_a_core() - NOT_OF_A_VLLM))
def test_the_parameters_are_those_of_our_core(name: str) -> None:
    ours, theirs = inspect.getattr_static(EngineCore, name, None), methods_of_vllm_core()[name]
    if not inspect.isfunction(ours):
        return  # a property or an attribute
    assert isinstance(theirs, ast.FunctionDef)
    expected = [
        (parameter.name, parameter.default is not inspect.Parameter.empty)
        for parameter in inspect.signature(ours).parameters.values()
    ]
    arguments = theirs.args.posonlyargs + theirs.args.args
    num_required = len(arguments) - len(theirs.args.defaults)
    found = [(argument.arg, place >= num_required) for place, argument in enumerate(arguments)]
    found += [
        (argument.arg, default is not None)
        for argument, default in zip(theirs.args.kwonlyargs, theirs.args.kw_defaults, strict=True)
    ]
    assert found == expected


# ---- the engine's inbox --------------------------------------------------------------------------------------


class FakeCore:
    next_step = 7

    def take_outputs(self) -> None:
        return None


def test_a_failing_command_ends_up_in_its_call_and_not_in_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = VllmEngine(FakeCore(), lambda: None)
    broken = engine.submit(lambda core: 1 / 0)
    fine = engine.submit(lambda core: "fine")
    engine.boundary()
    assert isinstance(broken.error, SchedtopError)
    assert "ZeroDivisionError" in str(broken.error)
    assert (fine.result, fine.step) == ("fine", 7)
    assert list(engine.outbox) == [broken, fine]
    assert "the engine goes on" in caplog.text


def test_an_idle_engine_is_woken_and_a_busy_one_is_left_alone() -> None:
    wakes: list[int] = []
    engine = VllmEngine(FakeCore(), lambda: wakes.append(1))
    engine.submit(lambda core: None)
    engine.is_idle = False
    engine.submit(lambda core: None)
    assert wakes == [1]


# ---- the books -----------------------------------------------------------------------------------------------


def request(request_id: str, num_computed: int = 0, is_chunk: bool = False, num_output: int = 0) -> Any:
    return SimpleNamespace(
        request_id=request_id, num_prompt_tokens=10, max_tokens=5, priority=0, num_computed_tokens=num_computed,
        is_prefill_chunk=is_chunk, num_output_tokens=num_output,
    )  # fmt: skip


def answers(*ids: str, num_tokens: int = 1) -> list[Any]:
    return [
        SimpleNamespace(request_id=request_id, new_token_ids=[1] * num_tokens, finish_reason=None) for request_id in ids
    ]


def books_with(*requests: Any) -> Books:
    books = Books()
    for one in requests:
        books.queued(one)
    return books


def test_gaps_between_tokens_are_counted_for_each_request_that_went_on() -> None:
    books = books_with(request("a"), request("b"), request("c"))
    books.got(answers("a", "b"), 1.0)
    books.got(answers("a", "b"), 3.0)
    books.got(answers("b", "c"), 4.0)
    books.got(answers("a", "b", "c"), 5.0)
    samples = books.stats.take_samples()
    gaps = {gap: sum(count for g, count in samples.itl if g == gap) for gap, _ in samples.itl}
    assert gaps == {2.0: 3, 1.0: 3}  # a waited 2 s twice, b once; 1 s: b twice, c once
    assert len(samples.ttft) == 3
    assert books.stats.generated_tokens == samples.num_output_tokens == 9
    assert books.last_token_at("a") == 5.0


def test_several_tokens_at_once_are_one_gap_and_zeros() -> None:
    books = books_with(request("a"))
    books.got(answers("a"), 1.0)
    books.got(answers("a", num_tokens=3), 2.0)
    books.got(answers("a"), 4.0)
    assert sorted(books.stats.take_samples().itl) == [(0.0, 2), (1.0, 1), (2.0, 1)]


def test_a_step_is_split_into_prefill_and_decode() -> None:
    decoding, long = request("d", num_computed=30), request("p", num_computed=8, is_chunk=True)
    books = books_with(decoding, long)
    books.admitted("p", 10, 0, PlannedStep(1, 0.0))
    plan = PlannedStep(2, 0.0)
    plan.total = 9
    books.count_scheduled(plan, {"d": 1, "p": 8}, [decoding, long])
    assert (plan.num_decodes, plan.largest_chunk, plan.num_scheduled) == (1, 8, 2)
    assert plan.num_context == 30 + 8 * (8 - 4)
    long.is_prefill_chunk, long.num_computed_tokens = False, 10
    last = PlannedStep(3, 0.0)
    last.total = 3
    books.count_scheduled(last, {"d": 1, "p": 2}, [decoding, long])
    assert last.num_decodes == 1
    assert books.prefilling == {}


def test_a_request_not_scheduled_this_time_adds_no_context() -> None:
    scheduled, left_out = request("a", num_computed=5), request("b", num_computed=1000)
    plan = PlannedStep(1, 0.0)
    plan.total = 1
    books_with(scheduled, left_out).count_scheduled(plan, {"a": 1}, [scheduled, left_out])
    assert plan.num_context == 5


def test_an_end_is_counted_once_with_the_tokens_the_request_had() -> None:
    books = books_with(request("a", num_output=4))
    books.ended("a", "length")
    books.ended("a", "abort")
    assert dict(books.stats.finished) == {"length": 1}
    assert [end[-1] for end in books.stats.recent_ends] == [4]
    assert [event.kind for event in books.stats.take_events()] == [EventKind.QUEUED, EventKind.FINISHED]


def test_a_preempted_request_counts_what_it_lost_and_starts_its_prefill_over() -> None:
    books = books_with(request("a"))
    books.admitted("a", 10, 0, PlannedStep(1, 0.0))
    lost = Preemption(
        step=1, mono=0.0, victim="a", beneficiary="b", num_lost_tokens=40, num_blocks_freed=3, free_blocks_before=0,
        free_blocks_after=3, num_preemptions=1,
    )  # fmt: skip
    books.preempted(lost)
    assert books.prefilling == {}
    again = PlannedStep(2, 0.0)
    books.admitted("a", 10, 0, again)
    assert (again.num_admitted, again.num_resumed) == (0, 1)
    assert books.stats.counters().lost_tokens == 40


def test_a_record_is_made_of_its_step() -> None:
    books = books_with(request("a"))
    plan = PlannedStep(5, 0.0)
    plan.total, plan.num_decodes, plan.schedule_s = 3, 1, 0.001
    record = books.record(plan, Counts(running=1, waiting=2, deferred=0, free=7, usable=10), 0, 0.002)
    assert (record.step, record.num_prefill_tokens, record.blocks_in_use) == (5, 2, 3)
    assert math.isfinite(record.forward_s)
