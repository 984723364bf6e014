"""The prefix cache: what is found, what is computed anyway, what is counted, and what is evicted first."""

import pytest
from factories import Engine, make_request, make_scheduler, oracle, prompt, run_steps, tokens_of

from schedtop.engine.request import Request
from schedtop.engine.sampling_params import SamplingParams


def cached(**settings):
    return make_scheduler(prefix_caching=True, **settings)


def complete(sched, length: int, seed: int = 1, name: str = "filler") -> None:
    """Run a request of one output token to its end: its full blocks stay cached."""
    sched.add_request(make_request(name, length, 1, seed=seed))
    run_steps(sched)
    assert name not in sched.requests


def test_a_cached_prefix_is_counted_as_computed_and_only_the_rest_is_charged() -> None:
    sched = cached(max_num_batched_tokens=4096)
    complete(sched, 2048)
    request = make_request("r", 2100, seed=1)
    sched.add_request(request)
    plan = sched.schedule()
    assert tokens_of(plan) == {"r": 52}
    assert plan.output.scheduled_new_reqs[0].num_computed_tokens == 2048
    assert plan.budget == 4096 - 52


@pytest.mark.parametrize(("length", "computed"), [(64, 16), (65, 1), (63, 15), (16, 16), (17, 1)])
def test_a_token_is_computed_even_if_all_are_cached(length: int, computed: int) -> None:
    sched = cached()
    complete(sched, length)
    sched.add_request(make_request("r", length, seed=1))
    assert tokens_of(sched.schedule()) == {"r": computed}


def test_only_full_blocks_are_cached() -> None:
    sched = cached()
    complete(sched, 40)
    assert sched.kv.usage().cached == 2


def test_the_lookup_is_redone_if_the_request_was_not_admitted() -> None:
    sched = cached(usable=8)
    complete(sched, 48)
    sched.add_request(make_request("runner", 80, 60, seed=2))
    run_steps(sched)
    waiting = make_request("w", 64, 1, seed=1)
    sched.add_request(waiting)
    run_steps(sched, 40)  # the runner grows into the blocks that were cached for `w`
    assert waiting.num_cached_tokens == 0
    run_steps(sched, 30)
    assert "w" not in sched.requests
    assert sched.stats.prefix_cache_hits == 0


def test_a_lookup_is_counted_once_at_admission() -> None:
    sched = cached(usable=8)
    complete(sched, 48)
    sched.add_request(make_request("runner", 70, 4, seed=2))
    run_steps(sched)
    queries = sched.stats.prefix_cache_queries
    sched.add_request(make_request("w", 60, 1, seed=1))
    run_steps(sched, 2)
    assert sched.stats.prefix_cache_queries == queries
    run_steps(sched, 3)
    assert sched.stats.prefix_cache_queries == queries + 60


def test_hits_of_resumed_requests_are_counted_apart() -> None:
    sched = cached()
    request = make_request("r", 40, 50, seed=1)
    sched.add_request(request)
    run_steps(sched, 2)
    sched.preempt(request)
    run_steps(sched)
    stats = sched.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 0)
    assert (stats.resumed_cache_queries, stats.resumed_cache_hits) == (42, 32)
    assert request.num_cached_tokens == 0


def test_a_resumed_request_looks_up_prompt_and_output() -> None:
    sched = cached()
    request = make_request("r", 30, 50, seed=1)
    sched.add_request(request)
    run_steps(sched, 20)
    sched.preempt(request)
    assert tokens_of(sched.schedule()) == {"r": 50 - 48}


def test_a_request_admitted_later_in_the_same_step_hits_blocks_planned_in_it() -> None:
    engine = Engine(prefix_caching=True)
    engine.add("a", 64, 4, seed=1)
    engine.add("b", 70, 4, seed=1)
    engine.step()
    assert engine.plans[0].num_scheduled_tokens == {"a": 64, "b": 6}
    taken = engine.run()
    assert taken.tokens["b"] == oracle(prompt(70, 1), 4)


def test_freed_blocks_keep_their_content_until_they_are_reused() -> None:
    sched = cached(usable=4)
    complete(sched, 48)
    usage = sched.kv.usage()
    assert (usage.free, usage.cached) == (4, 3)
    complete(sched, 64, seed=9)
    sched.add_request(make_request("r", 48, 1, seed=1))
    assert tokens_of(sched.schedule()) == {"r": 48}


def test_the_chain_is_eaten_from_its_tail() -> None:
    for _ in range(5):
        sched = cached(usable=3)
        complete(sched, 48)
        complete(sched, 16, seed=2, name="other")
        sched.add_request(make_request("again", 48, 1, seed=1))
        assert sched.schedule().admissions[0].num_hit_tokens == 32


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    sched = cached(usable=6)
    complete(sched, 40)
    first = sched.kv.pool.take(4)
    assert [block.block_id for block in first] == [3, 4, 5, 6]


def test_a_hit_that_nobody_uses_counts_as_a_block_needed() -> None:
    sched = cached(usable=5)
    complete(sched, 32)
    sched.add_request(make_request("runner", 31, 50, seed=2))
    run_steps(sched)
    sched.add_request(make_request("r", 60, 1, seed=1))  # 4 blocks, 2 of them hits that lie free; 3 are free
    plan = sched.schedule()
    assert (plan.blocked.needed, plan.blocked.free) == (4, 3)


def shares(one: dict, other: dict) -> bool:
    """Whether a second request with the same prompt hits what the first one cached."""
    sched = cached(max_adapters=4)
    for name, fields in (("one", one), ("other", other)):
        sched.add_request(Request(name, prompt(64, 1), SamplingParams(max_tokens=1), **fields))
        run_steps(sched)
    return sched.stats.prefix_cache_hits > 0


def test_salt_and_adapter_separate_and_equal_keys_share() -> None:
    assert shares({}, {})
    assert shares({"cache_salt": "x"}, {"cache_salt": "x"})
    assert shares({"adapter": "x"}, {"adapter": "x"})
    assert not shares({"adapter": "x"}, {})
    assert not shares({"cache_salt": "x"}, {})
    assert not shares({"adapter": "x"}, {"cache_salt": "x"})
    assert not shares({"cache_salt": "ab", "adapter": "c"}, {"cache_salt": "a", "adapter": "bc"})
    assert not shares({"cache_salt": ""}, {})


def test_with_prefix_caching_off_nothing_is_found_and_switching_it_on_starts_anew() -> None:
    engine = Engine(prefix_caching=True)
    engine.add("a", 64, 1, seed=1)
    engine.run()
    engine.core.set_knobs({"prefix_caching": False})
    engine.add("b", 64, 1, seed=1)
    engine.run()
    assert engine.total_planned("b") == 64
    engine.core.set_knobs({"prefix_caching": True})
    engine.add("c", 64, 1, seed=1)
    engine.run()
    assert engine.total_planned("c") == 16


def test_a_reset_forgets_every_prefix_and_says_when_it_could_not() -> None:
    engine = Engine(prefix_caching=True)
    engine.add("a", 64, 8, seed=1)
    engine.step()
    assert engine.core.reset_prefix_cache() is False
    assert engine.core.reset_prefix_cache(preempt_running=True) is True
    engine.run()
    assert engine.total_planned("a") == 64 + 65 + 6
    assert engine.core.reset_prefix_cache() is True
    assert engine.sched.kv.usage().cached == 0


def test_a_withdrawn_requests_blocks_are_not_found() -> None:
    sched = cached(usable=4, policy="priority", max_num_batched_tokens=64, reserve_full_prompt=False)
    low = make_request("low", 60, 4, seed=1, priority=9)
    high = make_request("high", 16, 60, seed=2, priority=0)
    sched.add_request(high)
    run_steps(sched)
    sched.apply_knobs(_with(sched, long_prefill_token_threshold=16))
    sched.add_request(low)
    run_steps(sched, 1)
    sched.running.reverse()  # `low` is planned first, `high` then takes its block
    for _ in range(20):
        plan = run_steps(sched)[0]
        if plan.preempted:
            break
    assert plan.preempted == [low]
    num_computed = plan.preemptions[0].num_lost_tokens
    assert len(sched.kv.find_prefix(low)) * 16 <= num_computed


def _with(sched, **changes):
    from schedtop.engine.knobs import change_knobs, knob_table

    return change_knobs(sched.knobs, changes, knob_table(sched.config))
