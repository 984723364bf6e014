"""Structured output on the fake runner: grammars are compiled aside, bounded in number and time, and obeyed."""

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, MutableSequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.daemon_executor import DaemonExecutor
from schedtop.engine.errors import RequestRefused
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import FinishReason, Viewport, WaitReason
from schedtop.engine.structured.manager import LOAD_LIMIT_S, NUM_WORKERS, TIME_LIMIT_S

EOS = 7


class Cycle:
    """A grammar: the tokens of the schema in turn, then the end."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def new_state(self) -> "CycleState":
        return CycleState(self.tokens)


class CycleState:
    def __init__(self, tokens: list[int]) -> None:
        self.left = deque([*tokens, EOS])

    def fill_bitmask(self, words: MutableSequence[int]) -> None:
        token = self.left[0] if self.left else EOS
        words[token // 32] |= 1 << token % 32

    def accept(self, token_id: int) -> bool:
        if not self.left or self.left[0] != token_id:
            return False
        self.left.popleft()
        return True

    @property
    def is_finished(self) -> bool:
        return len(self.left) <= 1


class FakeBackend:
    """Schemas are JSON lists of tokens. Counts builds."""

    def __init__(self) -> None:
        self.built: list[str] = []

    def compile(self, schema: str) -> Cycle:
        self.built.append(schema)
        return Cycle(json.loads(schema))


class ByHand(Executor):
    """Futures that are worked off when told to, in order, the cancelled ones left out."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, count: int = 1_000_000) -> None:
        while self.jobs and count:
            count -= 1
            future, call = self.jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)

    @property
    def num_wanted(self) -> int:
        return sum(not future.cancelled() for future, _ in self.jobs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class Engine:
    def __init__(self, backend: Any = None, is_async: bool = False, executor: Executor | None = None, **sizes: Any):
        config = EngineConfig(**{"num_kv_blocks": 201, "max_num_batched_tokens": 256, "max_num_seqs": 64, **sizes})
        self.now = 0.0
        self.backend = backend or FakeBackend()
        self.by_hand = ByHand()
        self.core = EngineCore(
            config,
            FakeRunner(),
            initial_knobs(config, async_scheduling=is_async),
            clock=lambda: self.now,
            eos_token_ids=(EOS,),
            grammar_backend=self.backend,
            grammar_executor=executor or self.by_hand,
        )
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, str]] = {}

    def add(self, request_id: str, grammar: list[int] | str | None = None, max_tokens: int = 16) -> None:
        schema = json.dumps(grammar) if isinstance(grammar, list) else grammar
        self.core.add_request(request_id, [1, 2, 3], SamplingParams(max_tokens=max_tokens, grammar=schema))

    def step(self) -> None:
        done = self.core.step()
        assert self.core.self_check() == []
        for output in done.outputs if done else ():
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = (output.finish_reason, output.detail)

    def run(self) -> None:
        while self.core.has_work:
            self.step()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_output_follows_the_grammar_and_ends_with_it(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("r", [11, 12, 13])
    engine.by_hand.run()
    engine.run()
    assert engine.outputs == {"r": [11, 12, 13, EOS]}
    assert engine.ends["r"][0] is FinishReason.STOP


def test_a_preempted_request_goes_on_where_its_grammar_stood(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("r", [11, 12, 13, 14, 15])
    engine.by_hand.run()
    while len(engine.outputs.get("r", [])) < 2:
        engine.step()
    engine.core.preempt(["r"])
    engine.run()
    assert engine.outputs == {"r": [11, 12, 13, 14, 15, EOS]}


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_are_checked_against_the_grammar(is_async: bool, num_drafts: int) -> None:
    engine = Engine(is_async=is_async, max_num_speculative_tokens=num_drafts)
    runner = engine.core._runner
    assert isinstance(runner, FakeRunner)
    runner.proposer = lambda tokens: [tokens[-1] + 1] * num_drafts  # the first is right until the end
    engine.add("r", list(range(11, 20)))
    engine.by_hand.run()
    engine.run()
    assert engine.outputs == {"r": [*range(11, 20), EOS]}


def test_a_request_waits_for_its_grammar_and_holds_up_nobody() -> None:
    engine = Engine()
    engine.add("waits", [11])
    engine.add("plain", max_tokens=2)
    engine.run()
    assert set(engine.ends) == {"plain"}
    assert engine.core.snapshot(Viewport()).waiting[0].wait_reason is WaitReason.GRAMMAR
    engine.by_hand.run()
    engine.run()
    assert engine.outputs["waits"] == [11, EOS]


def test_fifty_requests_with_one_schema_cost_one_build() -> None:
    engine = Engine()
    for index in range(50):
        engine.add(f"r{index}", [11, 12])
    engine.by_hand.run()
    engine.run()
    assert len(engine.backend.built) == 1 and len(engine.ends) == 50
    engine.add("later", [11, 12])
    engine.run()
    assert len(engine.backend.built) == 1 and engine.outputs["later"] == [11, 12, EOS]


def test_a_grammar_that_fails_ends_its_request_with_the_reason_one_step_later() -> None:
    engine = Engine()
    engine.add("bad", "no JSON")
    engine.add("plain", max_tokens=3)
    engine.by_hand.run()
    engine.step()
    reason, detail = engine.ends["bad"]
    assert reason is FinishReason.ERROR and detail.startswith("grammar: JSONDecodeError: Expecting value")
    engine.run()
    assert len(engine.outputs["plain"]) == 3


def test_a_grammar_that_failed_is_tried_again_for_the_next_request() -> None:
    engine = Engine()
    for request_id in ("a", "b"):
        engine.add(request_id, "no JSON")
        engine.by_hand.run()
        engine.run()
    assert len(engine.backend.built) == 2 and len(engine.ends) == 2


def test_a_build_that_hangs_fails_its_request_at_the_time_limit_and_wakes_an_idle_engine_for_it() -> None:
    engine = Engine()
    engine.add("hangs", [11])
    engine.run()
    assert engine.core.seconds_to_deadline == TIME_LIMIT_S
    engine.now = TIME_LIMIT_S - 0.5
    assert not engine.core.has_work
    engine.now = TIME_LIMIT_S
    assert engine.core.has_work
    engine.run()
    reason, detail = engine.ends["hangs"]
    assert reason is FinishReason.ERROR and "within 20 s" in detail
    assert engine.core.seconds_to_deadline is None


def test_a_grammar_that_comes_after_its_requests_end_changes_nothing() -> None:
    engine = Engine()
    engine.add("late", [11])
    engine.now = TIME_LIMIT_S
    engine.run()
    engine.add("gone", [12])
    engine.core.abort(["gone"])
    engine.by_hand.run()
    engine.run()
    assert {request_id: end[0] for request_id, end in engine.ends.items()} == {
        "late": FinishReason.ERROR,
        "gone": FinishReason.ABORT,
    }


def test_a_build_that_nobody_waits_for_any_more_is_never_begun() -> None:
    engine = Engine()
    engine.add("leaves", [11])
    engine.add("stays", [12])
    engine.add("shares", [12])
    engine.core.abort(["leaves", "stays"])
    assert engine.by_hand.num_wanted == 1
    engine.by_hand.run()
    engine.run()
    assert engine.backend.built == ["[12]"]
    assert engine.outputs["shares"] == [12, EOS]


def test_an_id_used_again_gets_its_own_grammar_and_not_its_predecessors() -> None:
    engine = Engine()
    engine.add("r", [11])
    ((first, call),) = engine.by_hand.jobs
    assert first.set_running_or_notify_cancel()  # at work already: it can't be cancelled
    engine.core.abort(["r"])
    engine.add("r", [12])
    first.set_result(call())
    engine.run()
    assert engine.core.snapshot(Viewport()).num_deferred == 1
    engine.by_hand.jobs.popleft()
    engine.by_hand.run()
    engine.run()
    assert engine.outputs["r"] == [12, EOS]


def test_an_id_used_again_with_the_same_schema_isnt_failed_by_the_build_that_was_cancelled() -> None:
    engine = Engine()
    engine.add("r", [11])
    engine.core.abort(["r"])
    engine.add("r", [11])
    engine.by_hand.run()
    engine.run()
    assert engine.outputs["r"] == [11, EOS]


def test_fifty_hanging_builds_take_no_more_than_the_build_slots_and_leave_a_plain_request_alone() -> None:
    may_go_on = threading.Event()
    begun: list[str] = []
    both_begun = threading.Semaphore(0)

    class Hanging(FakeBackend):
        def compile(self, schema: str) -> Cycle:
            begun.append(schema)
            both_begun.release()
            may_go_on.wait()
            return super().compile(schema)

    executor = DaemonExecutor(NUM_WORKERS, "grammar")
    engine = Engine(Hanging(), executor=executor)
    for index in range(50):
        engine.add(f"r{index}", [index])
    engine.add("plain", max_tokens=3)
    for _ in range(NUM_WORKERS):
        both_begun.acquire()
    engine.run()
    assert len(engine.outputs["plain"]) == 3 and set(engine.ends) == {"plain"}
    engine.core.abort([f"r{index}" for index in range(25)])
    engine.now = TIME_LIMIT_S
    engine.run()
    reasons = [end[0] for end in engine.ends.values()]
    assert (reasons.count(FinishReason.ABORT), reasons.count(FinishReason.ERROR)) == (25, 25)
    may_go_on.set()
    executor.shutdown(wait=True)
    assert len(begun) == NUM_WORKERS


def test_an_engine_without_a_backend_refuses_grammars() -> None:
    core = EngineCore(EngineConfig(), FakeRunner())
    with pytest.raises(RequestRefused, match="no grammar backend"):
        core.add_request("r", [1], SamplingParams(grammar="{}"))


def test_a_build_that_never_returns_doesnt_keep_the_process_alive() -> None:
    code = (
        "import threading\n"
        "from schedtop.engine.daemon_executor import DaemonExecutor\n"
        "begun = threading.Event()\n"
        "def hang():\n"
        "    begun.set()\n"
        "    threading.Event().wait()\n"
        "DaemonExecutor(1, 'x').submit(hang)\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class LateBackend(FakeBackend):
    """A backend whose library isn't loaded yet."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = False

    def load(self) -> None:
        self.is_loaded = True


def test_the_library_is_loaded_for_the_first_grammar_and_not_before() -> None:
    engine = Engine(LateBackend())
    engine.add("plain", max_tokens=3)
    engine.run()
    assert not engine.backend.is_loaded and not engine.by_hand.jobs
    engine.add("wants", [11])
    engine.by_hand.run()
    engine.run()
    assert engine.backend.is_loaded and engine.outputs["wants"] == [11, EOS]


def test_the_time_to_load_the_library_does_not_count_against_the_limit_of_a_build() -> None:
    class Hanging(LateBackend):
        def load(self) -> None:
            super().load()
            engine.now = 100.0

        def compile(self, schema: str) -> Cycle:
            hung.append(schema)
            raise Hung

    class Hung(BaseException):
        """Stands for a build that doesn't come back."""

    hung: list[str] = []
    engine = Engine(Hanging())
    engine.add("waits", [11])
    assert engine.core.seconds_to_deadline == LOAD_LIMIT_S
    engine.now = 90.0
    engine.run()
    assert not engine.ends
    with pytest.raises(Hung):
        engine.by_hand.run()
    assert engine.core.has_work  # the core is woken, to count anew
    engine.run()
    assert hung and not engine.ends and engine.core.seconds_to_deadline == TIME_LIMIT_S
    engine.now = 100.0 + TIME_LIMIT_S
    engine.run()
    assert engine.ends["waits"] == (FinishReason.ERROR, "grammar not compiled within 20 s")


def test_a_library_that_never_loads_fails_those_who_wait_for_it() -> None:
    engine = Engine(LateBackend())
    engine.add("waits", [11])
    engine.now = LOAD_LIMIT_S
    engine.run()
    reason, detail = engine.ends["waits"]
    assert reason is FinishReason.ERROR and "library wasn't loaded within 120 s" in detail


def test_a_library_that_fails_to_load_fails_the_request_in_words_and_is_tried_again() -> None:
    class Broken(LateBackend):
        def load(self) -> None:
            raise ImportError("no such library")

    engine = Engine(Broken())
    for request_id in ("a", "b"):
        engine.add(request_id, [11])
        engine.by_hand.run()
        engine.run()
        assert "ImportError: no such library" in engine.ends[request_id][1]
