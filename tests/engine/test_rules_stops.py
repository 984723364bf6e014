"""Stops: one reason each, and what becomes of everything the request held."""

from factories import Engine, make_request, make_scheduler, oracle, run_steps

from schedtop.engine.request import Request
from schedtop.engine.snapshot import FinishReason


def answer(engine: Engine, request_id: str) -> list[int]:
    return engine.taken.tokens.get(request_id, [])


def prompt_and_oracle(count: int) -> tuple[list[int], list[int]]:
    tokens = make_request("r", 10).token_ids
    return tokens, oracle(tokens, count)


def test_eos_ends_a_request_unless_it_ignores_it() -> None:
    tokens, expected = prompt_and_oracle(8)
    for ignore, reason, length in ((False, "stop", 4), (True, "length", 8)):
        engine = Engine(eos=[expected[3]])
        engine.add("r", tokens, 8, ignore_eos=ignore)
        engine.run()
        assert engine.reasons() == {"r": reason}
        assert answer(engine, "r") == expected[:length]


def test_a_stop_token_ends_a_request_even_if_it_ignores_eos() -> None:
    tokens, expected = prompt_and_oracle(8)
    engine = Engine(eos=[expected[1]])
    engine.add("r", tokens, 8, ignore_eos=True, stop_token_ids=(expected[2],))
    engine.run()
    assert (engine.reasons(), answer(engine, "r")) == ({"r": "stop"}, expected[:3])


def test_no_stop_token_counts_before_min_tokens() -> None:
    tokens, expected = prompt_and_oracle(8)
    engine = Engine(eos=[expected[1], expected[5]])
    engine.add("r", tokens, 8, min_tokens=4)
    engine.run()
    assert answer(engine, "r") == expected[:6]


def test_min_tokens_is_reached_by_the_token_that_completes_it() -> None:
    tokens, expected = prompt_and_oracle(8)
    engine = Engine(eos=[expected[3]])
    engine.add("r", tokens, 8, min_tokens=4)
    engine.run()
    assert answer(engine, "r") == expected[:4]


def test_max_tokens_ends_by_length() -> None:
    engine = Engine()
    engine.add("r", 10, 3)
    engine.run()
    assert (engine.reasons(), len(answer(engine, "r"))) == ({"r": "length"}, 3)


def test_max_model_len_ends_by_length() -> None:
    engine = Engine(max_model_len=20)
    engine.add("r", 10, 100)
    engine.run()
    assert (engine.reasons(), len(answer(engine, "r"))) == ({"r": "length"}, 10)


def test_eos_as_the_last_token_is_a_stop() -> None:
    tokens, expected = prompt_and_oracle(3)
    engine = Engine(eos=[expected[2]])
    engine.add("r", tokens, 3)
    engine.run()
    assert engine.reasons() == {"r": "stop"}


def test_a_repeated_pattern_ends_a_request_when_configured() -> None:
    def abab(tokens: list[int]) -> int:
        return len(tokens) if len(tokens) < 13 else 1 + len(tokens) % 2

    for max_pattern, length in ((0, 40), (1, 40), (2, 3 + 6)):
        engine = Engine(repetition_max_pattern=max_pattern, repetition_min_count=3 if max_pattern != 1 else 9)
        engine.runner.next_token = abab
        engine.add("r", 10, 40)
        engine.run()
        assert len(answer(engine, "r")) == length
        assert engine.reasons() == {"r": "repetition" if length < 40 else "length"}


def test_repetition_looks_at_the_output_not_at_the_prompt() -> None:
    engine = Engine(repetition_max_pattern=1, repetition_min_count=4)
    engine.runner.next_token = lambda tokens: 5
    engine.add("r", [5] * 10, 40)
    engine.run()
    assert len(answer(engine, "r")) == 4


def test_a_stop_inside_accepted_drafts_cuts_the_output_there() -> None:
    tokens, expected = prompt_and_oracle(8)
    engine = Engine(eos=[expected[2]], max_num_speculative_tokens=4)
    engine.runner.proposer = lambda known: oracle(known, 4)
    engine.add("r", tokens, 8)
    engine.run()
    assert answer(engine, "r") == expected[:3]
    assert engine.sched.stats.wasted_tokens > 0
    assert engine.num_free == engine.sched.kv.pool.num_usable


def test_a_callers_own_stop_condition_is_asked_too() -> None:
    from factories import split_settings

    from schedtop.engine.sched.scheduler import Scheduler
    from schedtop.engine.sim.clock import VirtualClock

    def after_two(request: Request) -> FinishReason | None:
        return FinishReason.STOP if request.num_output_tokens == 2 else None

    config, knobs = split_settings({})
    sched = Scheduler(config, knobs, clock=VirtualClock(), stop_conditions_extra=[after_two])
    sched.add_request(make_request("r", 5, 50))
    run_steps(sched, 2)
    assert sched.stats.finished == {FinishReason.STOP: 1}


def test_an_abort_ends_a_request_in_any_state_and_frees_everything() -> None:
    sched = make_scheduler()
    waiting, running, preempted, held = (make_request(name, 20, 50) for name in ("w", "r", "p", "h"))
    sched.add_request(running)
    sched.add_request(preempted)
    run_steps(sched, 2)
    sched.preempt(preempted)
    sched.add_request(waiting)
    sched.add_request(held)
    sched.hold(held)
    for request in (waiting, running, preempted, held):
        sched.finish(request, FinishReason.ABORT)
    assert {output.request_id for output in sched.ended} == {"w", "r", "p", "h"}
    assert (sched.requests, sched.num_waiting, sched.running, sched.num_waiting_tokens) == ({}, 0, [], 0)
    assert sched.kv.pool.num_free == sched.kv.pool.num_usable
    assert sorted(sched.schedule().output.finished_req_ids) == ["h", "p", "r", "w"]


def test_lowered_max_tokens_take_effect_and_are_refused_below_what_is_generated() -> None:
    import pytest

    from schedtop.engine.errors import SchedtopError

    engine = Engine()
    engine.add("r", 10, 100)
    engine.steps(5)
    with pytest.raises(SchedtopError, match="give at least 6"):
        engine.core.set_max_tokens(["r"], 5)
    engine.core.set_max_tokens(["r"], 6)
    engine.run()
    assert len(answer(engine, "r")) == 6
