"""Random lives of a whole engine: whatever happens, the books balance and every answer is the right one."""

from collections import Counter
from typing import Any

from factories import Engine, RecordingScheduler, oracle
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from scripted import FaultyRunner, ScriptedConnector

from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.errors import RequestRefused, SchedtopError
from schedtop.engine.knobs import KnobSpec
from schedtop.engine.sched.explain import wait_reason, waiting_by_reason
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.snapshot import FinishReason, PauseState, Viewport

EOS = range(30)
"""Of the 1,000 tokens of the fake model: every 33rd token ends an answer."""
BLOCK = 4


REQUEST = {
    "family": st.integers(0, 2),
    "length": st.integers(1, 60),
    "max_tokens": st.integers(1, 24),
    "priority": st.integers(-1, 1),
    "adapter": st.sampled_from([None, None, "a", "b", "c"]),
    "min_tokens": st.integers(0, 3),
    "name": st.integers(0, 40),
    "image": st.sampled_from([None, None, None, ("m0", 0, 6), ("m1", 3, 8), ("m2", 0, 12)]),
}


class CheckedScheduler(RecordingScheduler):
    """Checks each plan as it is made."""

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        scheduled = plan.num_scheduled_tokens
        total = sum(scheduled.values())
        assert total == plan.initial_budget - plan.budget <= self.knobs.max_num_batched_tokens
        assert all(count > 0 for count in scheduled.values())
        assert set(scheduled) <= {request.request_id for request in self.running}
        assert [request.request_id for request in plan.requests] == list(scheduled)
        if not self.knobs.preempt_on_arrival:
            assert not set(scheduled) & {victim.request_id for victim in plan.preempted}
            assert not (plan.preempted and plan.admissions), "somebody was admitted in a step that preempted"
        assert len(self.running) <= self.config.max_num_seqs
        num_prefill = total - plan.num_decode_tokens - plan.num_draft_tokens
        assert min(num_prefill, plan.num_decode_tokens, plan.num_draft_tokens) >= 0
        assert plan.num_draft_tokens == sum(map(len, plan.spec_token_ids.values()))
        assert plan.num_context_tokens >= total
        return plan


def propose(tokens: list[int]) -> list[int]:
    """Drafts of which none, some or all are right."""
    right = len(tokens) % 4
    return [*oracle(tokens, right), 7, 7, 7, 7]


def knob_values(spec: KnobSpec) -> st.SearchStrategy[Any]:
    match spec.kind:
        case "bool":
            return st.booleans()
        case "choice":
            return st.sampled_from(spec.choices)
        case "float":
            return st.sampled_from([0.0, 0.1, 0.4])
        case _:
            assert spec.low is not None and spec.high is not None
            return st.one_of(st.just(int(spec.low)), st.integers(int(spec.low), int(min(spec.high, 64))))


class EngineMachine(RuleBasedStateMachine):
    """One engine, and what each request must have answered."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Engine
        self.prompts: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}

    @initialize(
        usable=st.integers(6, 30),
        depth=st.integers(1, 3),
        num_drafts=st.sampled_from([0, 0, 2, 3]),
        num_adapters=st.sampled_from([0, 1, 2]),
        defers=st.booleans(),
        null_block=st.booleans(),
        is_async=st.booleans(),
        has_connector=st.booleans(),
    )
    def start(self, usable: int, depth: int, has_connector: bool, is_async: bool, defers: bool, **sizes: Any) -> None:
        runner = FaultyRunner(BLOCK)
        if sizes["num_drafts"]:
            runner.proposer = propose
        self.engine = Engine(
            runner,
            eos=EOS,
            scheduler_cls=CheckedScheduler,
            usable=usable,
            block_size=BLOCK,
            max_model_len=100,
            max_num_batched_tokens=32,
            max_num_seqs=6,
            encoder_cache_size=20,
            max_num_encoder_tokens=12,
            max_num_speculative_tokens=sizes["num_drafts"],
            max_adapters=sizes["num_adapters"],
            null_block=sizes["null_block"],
            async_depth=depth,
            async_scheduling=is_async,
            defers_block_free=defers,
            prefix_caching=True,
        )
        self.runner = runner
        self.core, self.sched = self.engine.core, self.engine.sched
        self.connector = ScriptedConnector(self.core, runner) if has_connector else None

    # ---- what happens ---------------------------------------------------------------------------------------

    @rule(requests=st.lists(st.fixed_dictionaries(REQUEST), min_size=1, max_size=5))
    def add_some(self, requests: list[dict[str, Any]]) -> None:
        for fields in requests:
            self.add(**fields)

    def add(self, family: int, length: int, max_tokens: int, name: int, min_tokens: int, **fields: Any) -> None:
        image = fields.pop("image", None)
        if image is not None:
            fields["media"] = (MediaItem(*image),)
        prompt = [(family * 331 + place * 37 + 40) % 997 for place in range(length)]
        if not self.engine.core.config.max_adapters:
            fields["adapter"] = None
        request_id = f"r{name}"
        if request_id in self.engine.taken.tokens or request_id in self.engine.taken.ends:
            return  # what it answered is on record
        try:
            self.engine.add(request_id, prompt, max_tokens, min_tokens=min(min_tokens, max_tokens), **fields)
        except RequestRefused:
            return
        self.prompts[request_id] = prompt
        self.limits[request_id] = max_tokens

    @rule(count=st.integers(3, 12))
    def steps(self, count: int) -> None:
        self.step(count)

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            self.check_progress()

    def live(self, choice: int) -> list[str]:
        ids = sorted(self.sched.requests)
        return [ids[choice % len(ids)]] if ids else []

    @rule(
        action=st.sampled_from(["abort", "preempt", "preempt", "hold", "release", "release"]),
        choice=st.integers(0, 99),
        drops=st.booleans(),
    )
    def operate(self, action: str, choice: int, drops: bool) -> None:
        if action == "preempt" and self.sched.running:
            request = self.sched.running[choice % len(self.sched.running)]
            self.core.preempt([request.request_id])
            if drops:
                self.sched.drop_in_flight(request)
        else:
            getattr(self.core, action)(self.live(choice))

    @rule(choice=st.integers(0, 99), priority=st.integers(-2, 2))
    def set_priority(self, choice: int, priority: int) -> None:
        self.core.set_priority(self.live(choice), priority)

    @rule(choice=st.integers(0, 99), max_tokens=st.integers(1, 30))
    def set_max_tokens(self, choice: int, max_tokens: int) -> None:
        ids = self.live(choice)
        try:
            self.core.set_max_tokens(ids, max_tokens)
        except SchedtopError:
            return
        for request_id in ids:
            self.limits[request_id] = max_tokens

    @rule(data=st.data())
    def turn_a_knob(self, data: st.DataObject) -> None:
        spec = data.draw(st.sampled_from(self.core.knob_table))
        self.core.set_knobs({spec.name: data.draw(knob_values(spec))})

    @rule(mode=st.sampled_from(["wait", "keep", "abort", "", "", "", ""]))
    def pause(self, mode: Any) -> None:
        if mode:
            self.core.pause(mode)
        else:
            self.core.resume()

    @rule(preempts=st.sampled_from([True, False, False]))
    def reset_cache(self, preempts: bool) -> None:
        self.core.reset_prefix_cache(preempts)

    @rule(late=st.booleans(), unlucky=st.integers(0, 3))
    def break_the_next_step(self, late: bool, unlucky: int) -> None:
        if unlucky:
            return
        self.runner.failing_step, self.runner.fails_late = self.core.next_step, late

    @rule(num=st.sampled_from([None, 0, 4, 8, 30]), keeps=st.booleans())
    def promise_kv(self, num: int | None, keeps: bool) -> None:
        if self.connector is not None:
            self.connector.num_loadable, self.connector.keeps_blocks = num, keeps

    @rule(choice=st.integers(0, 99), is_ok=st.booleans())
    def end_a_transfer(self, choice: int, is_ok: bool) -> None:
        if self.connector is None:
            return
        self.connector.answer()
        if self.connector.loading:
            self.connector.end(sorted(self.connector.loading)[choice % len(self.connector.loading)], is_ok)
        for request_id in sorted(self.connector.sending)[:1]:
            self.connector.sent(request_id)

    # ---- what must hold -------------------------------------------------------------------------------------

    def check_progress(self) -> None:
        """An engine that does nothing has nothing it could do."""
        sched = self.sched
        if self.core.has_work or sched.pause_state is PauseState.PAUSED_ALL:
            return
        assert not sched.in_flight
        assert not sched.running, "running, but nothing to schedule"
        if sched.pause_state is PauseState.RUNNING and sched.waiting:
            head = sched.waiting.peek()
            knobs, kv = sched.knobs, sched.kv
            is_too_long = not knobs.enable_chunked_prefill and head.num_tokens > knobs.max_num_batched_tokens
            loaded = [block for other in sched.waiting if other is not head for block in other.blocks]
            free = kv.num_free + sum(block.ref_cnt == 1 for block in loaded)
            needed = kv.blocks_for(head.num_tokens)
            if knobs.reserve_output or 0 < knobs.max_preemptions <= head.num_preemptions:
                needed = max(needed, min(kv.blocks_for(head.final_length), kv.capacity))
            assert is_too_long or needed > free, f"{head} could run"

    @invariant()
    def books_balance(self) -> None:
        sched = self.sched
        assert self.core.self_check() == []
        assert all(request.num_output_placeholders >= 0 for request in sched.requests.values())
        usage = sched.kv.usage()
        assert usage.free + usage.in_use + usage.held + usage.pending == usage.usable
        assert usage.in_use == len({block for request in sched.requests.values() for block in request.blocks})
        counters = sched.stats.counters()
        assert counters.added == sum(counters.finished.values()) + len(sched.running) + sched.num_waiting

    @invariant()
    def only_running_requests_read_encoder_entries(self) -> None:
        cache = self.sched.encoder.cache
        readers = set().union(*(entry.readers for entry in cache._entries.values()))
        assert readers <= {request.request_id for request in self.sched.running}
        assert cache.num_used == sum(entry.size for entry in cache._entries.values()) <= cache.capacity

    @invariant()
    def reasons_add_up(self) -> None:
        sched = self.sched
        waiting = [*sched.waiting, *sched.deferred]
        assert Counter(wait_reason(sched, request)[0].value for request in waiting) == waiting_by_reason(sched)

    @invariant()
    def a_snapshot_can_be_taken(self) -> None:
        snapshot = self.core.snapshot(Viewport(kv_cells=5, detail=next(iter(self.sched.requests), None)))
        assert snapshot.num_waiting == len(snapshot.waiting) == sum(snapshot.waiting_by_reason.values())
        assert snapshot.num_running == len(snapshot.running)

    @invariant()
    def answers_are_right_so_far(self) -> None:
        self.engine.take(self.core.take_outputs())
        for request_id, tokens in self.engine.taken.tokens.items():
            self.check_answer(request_id, tokens)

    def check_answer(self, request_id: str, tokens: list[int]) -> None:
        expected = self.expected(request_id, len(tokens))
        assert tokens == expected, f"{request_id} answered something else"

    def expected(self, request_id: str, count: int) -> list[int]:
        known = self.__dict__.setdefault("oracles", {}).setdefault(request_id, [])
        known += oracle([*self.prompts[request_id], *known], count - len(known))
        return known[:count]

    # ---- the end --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.finish_all()
        finally:
            self.core.shutdown()

    def finish_all(self) -> None:
        self.runner.failing_step = None
        self.core.set_knobs({"kv_block_limit": 0, "enable_chunked_prefill": True, "max_num_batched_tokens": 32})
        self.core.release(list(self.sched.requests))
        self.core.resume()
        for _ in range(3000):
            if self.connector is not None:
                self.connector.num_loadable = 0
                self.end_a_transfer(0, True)
            self.engine.step()
            self.books_balance()
            if not self.core.has_work and not (self.connector and (self.connector.loading or self.connector.sending)):
                break
        self.engine.take(self.core.take_outputs())
        assert not self.sched.requests, f"left over: {list(self.sched.requests.values())}"
        usage = self.sched.kv.usage()
        assert usage.free == usage.usable
        assert self.runner.requests == {}
        for request_id, end in self.engine.taken.ends.items():
            self.check_end(request_id, end.finish_reason)

    def check_end(self, request_id: str, reason: FinishReason | None) -> None:
        tokens = self.engine.taken.tokens.get(request_id, [])
        prompt, config = self.prompts[request_id], self.core.config
        self.check_answer(request_id, tokens)
        longest = min(self.limits[request_id], config.max_model_len - len(prompt))
        match reason:
            case FinishReason.LENGTH:
                assert len(tokens) == longest
            case FinishReason.STOP:
                assert tokens[-1] in EOS
            case FinishReason.CAPACITY:
                assert len(prompt) + len(tokens) == config.usable_tokens + 1
            case _:
                assert reason in (FinishReason.ABORT, FinishReason.ERROR)
                assert len(tokens) <= longest


def test_random_lives_of_an_engine_keep_its_books_and_its_answers() -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
