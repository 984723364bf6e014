"""Rules that only newly recorded traces showed, each alone and by name. The traces hold them in combination."""

from factories import make_request, make_scheduler, run_steps, sample, tokens_of

from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.snapshot import WaitReason


def drafting(**settings: object) -> Scheduler:
    """A scheduler with three drafts per request that has seen the 32 tokens of seed 1."""
    sched = make_scheduler(max_num_speculative_tokens=3, num_speculative_tokens=3, prefix_caching=True, **settings)
    sched.add_request(make_request("warm", 33, 1, seed=1))
    run_steps(sched, 2)
    return sched


def test_an_adaptive_threshold_needs_a_threshold_to_floor() -> None:
    sched = make_scheduler(max_num_batched_tokens=100, long_prefill_token_threshold_adaptive=True)
    sched.add_request(make_request("a", 90))
    sched.add_request(make_request("b", 90))
    assert tokens_of(sched.schedule()) == {"a": 90, "b": 10}


def test_a_hit_that_leaves_one_token_is_padded_with_drafts_even_alone() -> None:
    sched = drafting()
    sched.add_request(make_request("hit", 33, seed=1))
    plan = sched.schedule()
    assert tokens_of(plan) == {"hit": 4}
    assert plan.spec_token_ids == {"hit": [-1, -1, -1]}


def test_a_single_token_without_a_hit_is_padded_only_beside_running_ones() -> None:
    sched = drafting()
    sched.add_request(make_request("first", 1, seed=7))
    assert tokens_of(sched.schedule()) == {"first": 1}


def test_no_drafts_are_padded_beside_a_prompt_still_being_computed() -> None:
    sched = drafting(max_num_batched_tokens=200)
    sched.add_request(make_request("long", 300, seed=9))
    run_steps(sched, 1)
    sched.add_request(make_request("hit", 33, seed=1))
    assert tokens_of(sched.schedule()) == {"long": 100, "hit": 1}


def test_no_drafts_are_padded_past_the_models_length() -> None:
    sched = drafting(max_model_len=36)
    sched.add_request(make_request("hit", 33, 2, seed=1))
    assert tokens_of(sched.schedule()) == {"hit": 1}


def test_a_request_preempted_in_the_middle_of_its_prompt_waits_for_the_chunk_in_flight() -> None:
    sched = make_scheduler(async_scheduling=True, max_num_batched_tokens=64)
    request = make_request("r", 100)
    sched.add_request(request)
    chunk = sched.schedule()
    sched.preempt(request)
    assert request.defer_reason is WaitReason.IN_FLIGHT
    assert tokens_of(sched.schedule()) == {}
    sched.update_from_output(chunk, sample(chunk))
    assert request.defer_reason is None
    assert tokens_of(sched.schedule()) == {"r": 64}


def test_a_dropped_chunk_holds_up_nobody() -> None:
    sched = make_scheduler(async_scheduling=True, max_num_batched_tokens=64)
    request = make_request("r", 100)
    sched.add_request(request)
    sched.schedule()
    sched.preempt(request)
    sched.drop_in_flight(request)
    assert tokens_of(sched.schedule()) == {"r": 64}


def test_the_step_after_drafts_in_flight_is_planned_unless_one_token_already_ends_it() -> None:
    """Drafts in flight may all be rejected: they don't count as known ends."""
    sched = make_scheduler(async_scheduling=True, max_num_speculative_tokens=3, num_speculative_tokens=3)
    sched.add_request(make_request("r", 10, 5))
    prefill = sched.schedule()
    assert tokens_of(sched.schedule()) == {"r": 4}
    sched.update_from_output(prefill, sample(prefill))
    assert tokens_of(sched.schedule()) == {"r": 4}


def test_a_result_cut_by_its_end_settles_no_more_than_it_kept() -> None:
    sched = make_scheduler(
        async_scheduling=True, max_num_speculative_tokens=3, num_speculative_tokens=3, prefix_caching=True, block_size=4
    )
    request = make_request("r", 3, 5)
    sched.add_request(request)
    plans = [sched.schedule(), sched.schedule()]
    sched.update_from_output(plans[0], ModelRunnerOutput(sampled_token_ids=[[5]]))
    plans.append(sched.schedule())
    sched.update_from_output(plans[1], ModelRunnerOutput(sampled_token_ids=[[5, 5, 5]]))
    sched.update_from_output(plans[2], ModelRunnerOutput(sampled_token_ids=[[5, 5, 5, 5]]))
    assert request.is_finished and request.num_tokens == 8
    # The eighth token is never run through the model, so the second block is not full and can't be found.
    assert sched.kv.usage().cached == 1
