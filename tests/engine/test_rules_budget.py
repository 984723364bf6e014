"""Pass 1 and the budget: the gap formula, how a step is split, the threshold."""

import pytest
from factories import Engine, make_request, make_requests, make_scheduler, oracle, prompt, run_steps, tokens_of


def start(sched, *requests, steps: int = 1):
    for request in requests:
        sched.add_request(request)
    return run_steps(sched, steps)


def test_a_step_closes_the_gap_between_tokens_and_computed_tokens() -> None:
    sched = make_scheduler(max_num_batched_tokens=64)
    request = make_request("r", 100)
    first, second, third = start(sched, request, steps=3)
    assert [tokens_of(plan)["r"] for plan in (first, second, third)] == [64, 36, 1]
    assert request.num_computed_tokens == 101
    assert request.num_tokens == 102


def test_computed_advances_when_work_is_scheduled_not_when_it_finishes() -> None:
    sched = make_scheduler()
    request = make_request("r", 100)
    sched.add_request(request)
    sched.schedule()
    assert request.num_computed_tokens == 100


def test_the_gap_counts_drafts_and_placeholders() -> None:
    sched = make_scheduler(max_num_speculative_tokens=4)
    request = make_request("r", 20, max_tokens=50)
    start(sched, request)
    request.spec_token_ids = [1, 2, 3]
    assert tokens_of(sched.schedule()) == {"r": 4}

    ahead = make_scheduler(async_scheduling=True)
    other = make_request("a", 20, max_tokens=50)
    ahead.add_request(other)
    ahead.schedule()
    assert (other.num_output_placeholders, other.num_tokens) == (1, 20)
    assert tokens_of(ahead.schedule()) == {"a": 1}


def test_no_share_passes_the_models_length() -> None:
    sched = make_scheduler(max_model_len=40, max_num_speculative_tokens=8)
    request = make_request("r", 36, max_tokens=50)
    start(sched, request)
    request.spec_token_ids = [1] * 8
    assert tokens_of(sched.schedule()) == {"r": 40 - 1 - 36}


def test_running_requests_are_served_before_waiting_ones_and_in_admission_order() -> None:
    sched = make_scheduler(max_num_batched_tokens=64)
    start(sched, *make_requests(3, 10), steps=1)
    sched.add_request(make_request("late", 200))
    assert tokens_of(sched.schedule()) == {"r0": 1, "r1": 1, "r2": 1, "late": 61}


def test_the_budget_is_never_exceeded_and_is_spent_when_there_is_work() -> None:
    sched = make_scheduler(max_num_batched_tokens=50)
    for plan in start(sched, *make_requests(4, 90), steps=7):
        assert plan.total_num_scheduled_tokens == 50


def test_a_running_request_that_can_be_given_nothing_is_passed_over_not_a_barrier() -> None:
    sched = make_scheduler(async_scheduling=True)
    ending, going = make_request("ending", 16, max_tokens=1), make_request("going", 16, max_tokens=9)
    sched.add_request(ending)
    sched.add_request(going)
    sched.schedule()
    assert tokens_of(sched.schedule()) == {"going": 1}
    assert sched.running == [ending, going]


def test_a_request_starved_by_the_budget_keeps_its_place() -> None:
    sched = make_scheduler(max_num_batched_tokens=64)
    start(sched, *make_requests(4, 10))
    sched.apply_knobs(_with(sched, max_num_batched_tokens=2))
    assert tokens_of(run_steps(sched)[0]) == {"r0": 1, "r1": 1}
    sched.apply_knobs(_with(sched, max_num_batched_tokens=64))
    assert list(tokens_of(run_steps(sched)[0])) == ["r0", "r1", "r2", "r3"]


def _with(sched, **changes):
    from schedtop.engine.knobs import change_knobs, knob_table

    return change_knobs(sched.knobs, changes, knob_table(sched.config))


def test_the_threshold_caps_a_share_beside_other_requests() -> None:
    sched = make_scheduler(max_num_batched_tokens=256, long_prefill_token_threshold=32)
    plan = start(sched, make_request("long", 500), make_request("short", 20))[0]
    assert tokens_of(plan) == {"long": 32, "short": 20}


def test_the_threshold_does_not_apply_to_a_lone_request() -> None:
    sched = make_scheduler(max_num_batched_tokens=256, long_prefill_token_threshold=32)
    assert tokens_of(start(sched, make_request("long", 500))[0]) == {"long": 256}


def test_a_waiting_request_counts_as_eligible_even_when_it_cannot_run() -> None:
    sched = make_scheduler(max_num_batched_tokens=256, long_prefill_token_threshold=32)
    long, held = make_request("long", 500), make_request("held", 5)
    sched.add_request(long)
    sched.add_request(held)
    sched.hold(held)
    assert tokens_of(sched.schedule()) == {"long": 32}


@pytest.mark.parametrize(("threshold", "count", "share"), [(16, 4, 64), (16, 2, 128), (100, 4, 100), (0, 4, 64)])
def test_the_adaptive_threshold_is_floored_at_an_equal_share_of_the_buffer(
    threshold: int, count: int, share: int
) -> None:
    sched = make_scheduler(
        max_num_batched_tokens=256,
        long_prefill_token_threshold=threshold,
        long_prefill_token_threshold_adaptive=True,
    )
    plan = start(sched, *make_requests(count, 500))[0]
    if threshold == 0:  # nothing to floor: no threshold at all
        assert tokens_of(plan) == {"r0": 256}
    else:
        assert plan.num_scheduled_tokens["r0"] == share


def test_the_adaptive_floor_uses_the_allocated_buffer_not_the_live_budget() -> None:
    sched = make_scheduler(
        max_num_batched_tokens=256,
        long_prefill_token_threshold=16,
        long_prefill_token_threshold_adaptive=True,
        knobs={"max_num_batched_tokens": 100},
    )
    assert tokens_of(start(sched, *make_requests(4, 500))[0]) == {"r0": 64, "r1": 36}


def test_decodes_prefill_drafts_and_unused_add_up_to_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=64)
    engine.add("decoding", 10, 20)
    engine.step()
    engine.add("prompt", 30, 4)
    engine.step()
    record = engine.core.recent_steps(1)[0]
    assert (record.num_decode_tokens, record.num_prefill_tokens, record.num_draft_tokens) == (1, 30, 0)
    assert record.budget == 64
    assert record.largest_prefill_chunk == 30
    assert record.num_context_tokens == 11 + 30 * 31 // 2


def test_a_verified_step_counts_one_decode_token_and_its_drafts() -> None:
    engine = Engine(max_num_batched_tokens=64, max_num_speculative_tokens=3)
    engine.runner.proposer = lambda tokens: [1, 2, 3]
    engine.add("r", 10, 20)
    engine.steps(2)
    record = engine.core.recent_steps(1)[0]
    assert (record.num_decode_tokens, record.num_prefill_tokens, record.num_draft_tokens) == (1, 0, 3)
    assert record.largest_prefill_chunk == 0


def test_a_withdrawn_request_leaves_no_tokens_in_any_part_of_the_split() -> None:
    sched = make_scheduler(usable=4, max_num_speculative_tokens=3, policy="priority", reserve_full_prompt=False)
    low, high = make_request("low", 25, priority=5), make_request("high", 32, priority=0, max_tokens=40)
    start(sched, low)
    start(sched, high)
    low.spec_token_ids = [1]
    plan = sched.schedule()
    assert plan.preempted == [low]
    assert tokens_of(plan) == {"high": 1}
    assert (plan.num_decode_tokens, plan.num_draft_tokens, plan.total_num_scheduled_tokens) == (1, 0, 1)


def test_drafts_are_verified_and_the_output_is_that_of_plain_decoding() -> None:
    for depth in (False, True):
        engine = Engine(max_num_speculative_tokens=3, async_scheduling=depth)
        engine.runner.proposer = lambda tokens: [*oracle(tokens, 2), 1]
        engine.add("r", 40, 33)
        taken = engine.run()
        assert taken.tokens["r"] == oracle(engine.plans[0].output.scheduled_new_reqs[0].token_ids, 33)
        assert engine.sched.stats.accepted_tokens > 0
        assert engine.sched.stats.draft_tokens > engine.sched.stats.accepted_tokens
        counters = engine.sched.stats.counters()
        assert sum(counters.accepted_at) == counters.accepted_tokens
        assert counters.accepted_at[0] == counters.accepted_at[1] <= counters.drafts  # the third draft is always wrong
        assert (len(counters.accepted_at), counters.external_cache_queries) == (2, 0)


def test_drafts_beyond_the_threshold_or_budget_are_dropped() -> None:
    sched = make_scheduler(max_num_speculative_tokens=6, max_num_batched_tokens=64)
    request = make_request("r", 10, max_tokens=40)
    start(sched, request)
    sched.apply_knobs(_with(sched, max_num_batched_tokens=3))
    request.spec_token_ids = [1, 2, 3, 4, 5, 6]
    plan = sched.schedule()
    assert plan.spec_token_ids == {"r": [1, 2]}
    assert tokens_of(plan) == {"r": 3}


def test_rejected_drafts_take_the_computed_count_back() -> None:
    engine = Engine(max_num_speculative_tokens=4)
    engine.runner.proposer = lambda tokens: [1, 1, 1, 1]
    engine.add("r", 10, 20)
    engine.steps(3)
    request = engine.sched.requests["r"]
    assert request.num_computed_tokens == request.num_tokens - 1
    assert engine.taken.tokens["r"] == oracle(prompt_of(engine, "r"), 3)


def prompt_of(engine: Engine, request_id: str) -> list[int]:
    request = engine.sched.requests[request_id]
    return request.token_ids[: request.num_prompt_tokens]


def test_prompts_given_by_seed_are_the_same_tokens() -> None:
    assert prompt(5, 1) == prompt(9, 1)[:5] != prompt(5, 2)
