"""Every control on a real vLLM, by its effect on the steps that follow."""

import asyncio
from typing import Any

import msgspec
import pytest

from schedtop.control.client import CommandRefused
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AddRequest,
    DumpSteps,
    HoldRequests,
    KnobsAck,
    Pause,
    PreemptRequests,
    ReleaseRequests,
    RequestFilter,
    ResetPrefixCache,
    Resume,
    SelfCheck,
    SetKnobs,
    SetPriority,
)
from schedtop.engine.snapshot import PauseState, RequestStatus, StepRecord

EVERYTHING = RequestFilter(id_prefix="cmpl-")
PATIENCE_S = 120.0


async def steps_after(operator: Any, step: int) -> list[StepRecord]:
    ack = await operator.request(DumpSteps(count=1000))
    assert isinstance(ack, Ack)
    records = msgspec.convert(ack.data["steps"], list[StepRecord])
    return [record for record in records if record.step > step]


async def set_knobs(operator: Any, **changes: Any) -> KnobsAck:
    ack = await operator.request(SetKnobs(changes=changes))
    assert isinstance(ack, KnobsAck)
    return ack


async def test_the_budget_takes_hold_at_the_acknowledged_step(operator: Any, load: Any) -> None:
    ack = await set_knobs(operator, max_num_batched_tokens=64)
    await load.add("x" * 1500, 2)
    chunks = [record.largest_prefill_chunk for record in await steps_after(operator, ack.applied_at_step - 1)]
    assert max(chunks) == 64
    assert chunks.count(64) >= 20


async def test_the_threshold_caps_one_request_beside_others(operator: Any, load: Any) -> None:
    for prompt, length in (("a", 1000), ("b", 700), ("c", 1300)):
        load.keep_on(prompt, length)  # vLLM's threshold doesn't hold for a request that is alone
    await operator.settle(lambda snapshot: snapshot.num_running == 3)
    ack = await set_knobs(operator, long_prefill_token_threshold=48)
    await load.add("never seen before " * 60, 2)
    assert max(r.largest_prefill_chunk for r in await steps_after(operator, ack.applied_at_step - 1)) == 48


async def test_lowering_the_cap_drains_and_cuts_nobody(operator: Any, load: Any) -> None:
    tasks = [load.add(f"{i}", 400) for i in range(12)]
    before = await operator.settle(lambda snapshot: snapshot.num_running == 12)
    ack = await set_knobs(operator, max_num_seqs=4)
    later = load.add("later", 5)
    answers = await asyncio.gather(*tasks, later)
    assert all(answer["usage"]["completion_tokens"] in (400, 5) for answer in answers)
    records = await steps_after(operator, ack.applied_at_step)
    assert not any(record.num_admitted for record in records if record.num_running >= 4)
    assert (await operator.look()).counters.preemptions == before.counters.preemptions


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 513}, {"max_num_batched_tokens": -1}, {"max_num_batched_tokens": 0},
        {"max_num_seqs": 33}, {"max_num_seqs": -5}, {"watermark": -0.1}, {"policy": "lottery"},
        {"max_num_running_reqs": 1}, {"victim": "newest"}, {"max_num_batched_tokens": 64, "max_num_seqs": 1000},
    ],
)  # fmt: skip
async def test_what_would_kill_the_engine_is_refused_and_changes_nothing(
    operator: Any, load: Any, changes: dict[str, Any]
) -> None:
    task = load.add("still here", 50)
    before = (await operator.look()).knobs
    with pytest.raises(CommandRefused):
        await operator.request(SetKnobs(changes=changes))
    assert (await operator.look()).knobs == before
    assert (await task)["usage"]["completion_tokens"] == 50


async def test_output_is_the_same_after_preemption_and_cache_reset(operator: Any, load: Any) -> None:
    expected = (await load.add("the same prompt", 3000))["choices"][0]["text"]
    task = load.add("the same prompt", 3000)
    for _ in range(3):
        await operator.settle(lambda snapshot: snapshot.num_running == 1)
        await operator.request(Pause(mode="keep"))  # so that it can't end before the next turn
        await operator.request(PreemptRequests(select=EVERYTHING))
        await operator.request(ResetPrefixCache(preempt_running=True))
        await operator.request(Resume())
    assert (await task)["choices"][0]["text"] == expected
    assert (await operator.look()).recent_preemptions


async def test_an_abort_reaches_the_client(operator: Any, load: Any) -> None:
    task = load.add("never ends", 4000)
    await operator.settle(lambda snapshot: snapshot.num_running == 1)
    ack = await operator.request(AbortRequests(select=EVERYTHING))
    assert isinstance(ack, Ack)
    assert ack.touched is not None
    assert len(ack.touched.changed) == 1
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert (await operator.look()).pool.in_use == 0


async def test_an_abort_reaches_the_client_of_a_frozen_engine(operator: Any, load: Any) -> None:
    task = load.add("frozen", 4000)
    await operator.settle(lambda snapshot: snapshot.num_running == 1)
    await operator.request(Pause(mode="keep"))
    await operator.request(AbortRequests(select=EVERYTHING))
    async with asyncio.timeout(PATIENCE_S):
        await task


async def test_a_held_request_waits_and_goes_on_when_released_on_an_idle_engine(operator: Any, load: Any) -> None:
    task = load.add("hold me", 1500)
    await operator.settle(lambda snapshot: snapshot.num_running == 1)
    await operator.request(HoldRequests(select=EVERYTHING))
    held = await operator.settle(lambda snapshot: snapshot.num_running == 0)
    assert [row.status for row in held.waiting] == [RequestStatus.DEFERRED]
    await operator.request(ReleaseRequests(select=EVERYTHING))
    assert (await task)["usage"]["completion_tokens"] == 1500


async def test_pause_keeps_everything_and_resume_wakes_an_idle_engine(operator: Any, load: Any) -> None:
    task = load.add("pause me", 1500)
    await operator.settle(lambda snapshot: snapshot.num_running == 1)
    await operator.request(Pause(mode="keep"))
    frozen = await operator.look()
    assert frozen.pause is PauseState.PAUSED_ALL
    await operator.request(Resume())
    assert (await task)["usage"]["completion_tokens"] == 1500


async def test_a_drain_ends_what_has_started_preempted_requests_included(operator: Any, load: Any) -> None:
    started = [load.add(f"started {i}", 1500) for i in range(3)]
    await operator.settle(lambda snapshot: snapshot.num_running == 3)
    await operator.request(Pause(mode="wait"))
    await operator.request(PreemptRequests(select=EVERYTHING))
    late = load.add("late", 5)
    await asyncio.gather(*started)
    assert not late.done()
    await operator.request(Resume())
    assert (await late)["usage"]["completion_tokens"] == 5


async def test_priority_decides_who_is_admitted_next(operator: Any, load: Any) -> None:
    await set_knobs(operator, policy="priority", max_num_seqs=1)
    await operator.request(Pause(mode="keep"))
    tasks = [load.add(f"number {i}", 60) for i in range(3)]
    frozen = await operator.settle(lambda snapshot: snapshot.num_waiting == 3)
    last_id = frozen.waiting[-1].request_id
    await operator.request(SetPriority(select=RequestFilter(ids=[last_id]), priority=-5))
    assert (await operator.look()).waiting[0].request_id == last_id
    await operator.request(Resume())
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert any(last_id.startswith(task.result()["id"]) for task in done)
    await asyncio.gather(*tasks)


async def test_why_each_request_waits_adds_up_and_preemptions_name_both_sides(operator: Any, load: Any) -> None:
    for i in range(40):
        load.keep_on("y" * 300 + str(i), 900)
    snapshot = await operator.settle(lambda snapshot: snapshot.num_waiting > 5)
    assert sum(snapshot.waiting_by_reason.values()) == snapshot.num_waiting
    preempted = await operator.settle(
        lambda snapshot: any(record.beneficiary not in (None, record.victim) for record in snapshot.recent_preemptions)
    )  # vLLM's newest request may be its own victim
    assert all(record.num_lost_tokens >= 0 for record in preempted.recent_preemptions)
    assert any(record.num_lost_tokens for record in preempted.recent_preemptions)


async def test_requests_are_vllms_own_business_to_submit(operator: Any) -> None:
    with pytest.raises(CommandRefused, match="AddRequest"):
        await operator.request(AddRequest(request_id="mine", prompt_token_ids=[1, 2, 3]))


async def test_the_self_check_finds_nothing(operator: Any) -> None:
    ack = await operator.request(SelfCheck())
    assert isinstance(ack, Ack)
    assert ack.data["faults"] == []
