"""Every control on a real vLLM, by its effect on the steps that follow."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from vllm_server import Served

from schedtop.control.client import Client, CommandRefused
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AddRequest,
    DumpSteps,
    GetSnapshot,
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
    SnapshotReply,
)
from schedtop.engine.snapshot import PauseState, RequestStatus, Snapshot, StepRecord, Viewport

ALL = Viewport(running_rows=100, waiting_rows=200)
EVERYTHING = RequestFilter(id_prefix="cmpl-")
PATIENCE_S = 60.0


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    async with await Client.connect(served.socket, name="test") as client:
        yield client
        await client.request(Resume())
        await client.request(ReleaseRequests(select=EVERYTHING))
        await client.request(AbortRequests(select=EVERYTHING))
        changes = {"max_num_batched_tokens": 512, "max_num_seqs": 32, "policy": "fcfs", "watermark": 0.0,
                   "long_prefill_token_threshold": 0}  # fmt: skip
        await client.request(SetKnobs(changes=changes))
        await settle(client, lambda snapshot: snapshot.num_running + snapshot.num_waiting == 0)


class Load:
    """Completions under way against vLLM's own HTTP server."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self._url = f"{served.url}/v1/completions"
        self._session = session
        self.tasks: list[asyncio.Task[dict[str, Any]]] = []

    def add(self, prompt: str, max_tokens: int, priority: int = 0) -> asyncio.Task[dict[str, Any]]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0,
                "priority": priority}  # fmt: skip
        task = asyncio.create_task(self._post(body))
        self.tasks.append(task)
        return task

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._url, json=body) as response:
            answer: dict[str, Any] = await response.json()
            return answer


@pytest.fixture
async def load(served: Served) -> AsyncIterator[Load]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        load = Load(served, session)
        yield load
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)


async def look(client: Client) -> Snapshot:
    reply = await client.request(GetSnapshot(viewport=ALL))
    assert isinstance(reply, SnapshotReply)
    return reply.update.snapshot


async def settle(client: Client, is_so: Callable[[Snapshot], bool]) -> Snapshot:
    """Look again and again until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so(snapshot := await look(client)):  # noqa: ASYNC110  (the server has no event for it)
            await asyncio.sleep(0.02)
    return snapshot


async def steps_after(client: Client, step: int) -> list[StepRecord]:
    ack = await client.request(DumpSteps(count=1000))
    assert isinstance(ack, Ack)
    records = msgspec.convert(ack.data["steps"], list[StepRecord])
    return [record for record in records if record.step > step]


async def set_knobs(client: Client, **changes: Any) -> KnobsAck:
    ack = await client.request(SetKnobs(changes=changes))
    assert isinstance(ack, KnobsAck)
    return ack


async def test_the_budget_takes_hold_at_the_acknowledged_step(client: Client, load: Load) -> None:
    ack = await set_knobs(client, max_num_batched_tokens=64)
    await load.add("x" * 1500, 2)
    chunks = [record.largest_prefill_chunk for record in await steps_after(client, ack.applied_at_step - 1)]
    assert max(chunks) == 64
    assert chunks.count(64) >= 20


async def test_the_threshold_caps_one_request_beside_others(client: Client, load: Load) -> None:
    load.add("a", 800)
    await settle(client, lambda snapshot: snapshot.num_running == 1)
    ack = await set_knobs(client, long_prefill_token_threshold=48)
    await load.add("never seen before " * 60, 2)
    assert max(r.largest_prefill_chunk for r in await steps_after(client, ack.applied_at_step - 1)) == 48


async def test_lowering_the_cap_drains_and_cuts_nobody(client: Client, load: Load) -> None:
    tasks = [load.add(f"{i}", 200) for i in range(12)]
    before = await settle(client, lambda snapshot: snapshot.num_running == 12)
    ack = await set_knobs(client, max_num_seqs=4)
    later = load.add("later", 5)
    answers = await asyncio.gather(*tasks, later)
    assert all(answer["usage"]["completion_tokens"] in (200, 5) for answer in answers)
    records = await steps_after(client, ack.applied_at_step)
    assert not any(record.num_admitted for record in records if record.num_running >= 4)
    assert (await look(client)).counters.preemptions == before.counters.preemptions


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 513}, {"max_num_batched_tokens": -1}, {"max_num_batched_tokens": 0},
        {"max_num_seqs": 33}, {"max_num_seqs": -5}, {"watermark": -0.1}, {"policy": "lottery"},
        {"max_num_running_reqs": 1}, {"victim": "newest"}, {"max_num_batched_tokens": 64, "max_num_seqs": 1000},
    ],
)  # fmt: skip
async def test_what_would_kill_the_engine_is_refused_and_changes_nothing(
    client: Client, load: Load, changes: dict[str, Any]
) -> None:
    task = load.add("still here", 50)
    before = (await look(client)).knobs
    with pytest.raises(CommandRefused):
        await client.request(SetKnobs(changes=changes))
    assert (await look(client)).knobs == before
    assert (await task)["usage"]["completion_tokens"] == 50


async def test_output_is_the_same_after_preemption_and_cache_reset(client: Client, load: Load) -> None:
    expected = (await load.add("the same prompt", 900))["choices"][0]["text"]
    task = load.add("the same prompt", 900)
    for _ in range(3):
        await settle(client, lambda snapshot: snapshot.num_running == 1)
        await client.request(PreemptRequests(select=EVERYTHING))
        await client.request(ResetPrefixCache(preempt_running=True))
    assert (await task)["choices"][0]["text"] == expected
    assert (await look(client)).recent_preemptions


async def test_an_abort_reaches_the_client(client: Client, load: Load) -> None:
    task = load.add("never ends", 4000)
    await settle(client, lambda snapshot: snapshot.num_running == 1)
    ack = await client.request(AbortRequests(select=EVERYTHING))
    assert isinstance(ack, Ack)
    assert ack.touched is not None
    assert len(ack.touched.changed) == 1
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert (await look(client)).pool.in_use == 0


async def test_an_abort_reaches_the_client_of_a_frozen_engine(client: Client, load: Load) -> None:
    task = load.add("frozen", 4000)
    await settle(client, lambda snapshot: snapshot.num_running == 1)
    await client.request(Pause(mode="keep"))
    await client.request(AbortRequests(select=EVERYTHING))
    async with asyncio.timeout(PATIENCE_S):
        await task


async def test_a_held_request_waits_and_goes_on_when_released_on_an_idle_engine(client: Client, load: Load) -> None:
    task = load.add("hold me", 300)
    await settle(client, lambda snapshot: snapshot.num_running == 1)
    await client.request(HoldRequests(select=EVERYTHING))
    held = await settle(client, lambda snapshot: snapshot.num_running == 0)
    assert [row.status for row in held.waiting] == [RequestStatus.DEFERRED]
    await client.request(ReleaseRequests(select=EVERYTHING))
    assert (await task)["usage"]["completion_tokens"] == 300


async def test_pause_keeps_everything_and_resume_wakes_an_idle_engine(client: Client, load: Load) -> None:
    task = load.add("pause me", 200)
    await settle(client, lambda snapshot: snapshot.num_running == 1)
    await client.request(Pause(mode="keep"))
    frozen = await look(client)
    assert frozen.pause is PauseState.PAUSED_ALL
    await client.request(Resume())
    assert (await task)["usage"]["completion_tokens"] == 200


async def test_a_drain_ends_what_has_started_preempted_requests_included(client: Client, load: Load) -> None:
    started = [load.add(f"started {i}", 150) for i in range(3)]
    await settle(client, lambda snapshot: snapshot.num_running == 3)
    await client.request(Pause(mode="wait"))
    await client.request(PreemptRequests(select=EVERYTHING))
    late = load.add("late", 5)
    await asyncio.gather(*started)
    assert not late.done()
    await client.request(Resume())
    assert (await late)["usage"]["completion_tokens"] == 5


async def test_priority_decides_who_is_admitted_next(client: Client, load: Load) -> None:
    await set_knobs(client, policy="priority", max_num_seqs=1)
    first = load.add("first", 150)
    await settle(client, lambda snapshot: snapshot.num_running == 1)
    slow, quick = load.add("slow", 60), load.add("quick", 60)
    waiting = await settle(client, lambda snapshot: snapshot.num_waiting == 2)
    last_id = waiting.waiting[-1].request_id
    await client.request(SetPriority(select=RequestFilter(ids=[last_id]), priority=-5))
    assert (await look(client)).waiting[0].request_id == last_id
    await asyncio.gather(first, slow, quick)


async def test_why_each_request_waits_adds_up(client: Client, load: Load) -> None:
    for i in range(40):
        load.add("y" * 300 + str(i), 900)
    snapshot = await settle(client, lambda snapshot: snapshot.num_waiting > 5)
    assert sum(snapshot.waiting_by_reason.values()) == snapshot.num_waiting
    preempted = await settle(client, lambda snapshot: bool(snapshot.recent_preemptions))
    record = preempted.recent_preemptions[-1]
    assert record.victim != record.beneficiary
    assert record.num_lost_tokens > 0


async def test_requests_are_vllms_own_business_to_submit(client: Client) -> None:
    with pytest.raises(CommandRefused, match="AddRequest"):
        await client.request(AddRequest(request_id="mine", prompt_token_ids=[1, 2, 3]))


async def test_the_self_check_finds_nothing(client: Client) -> None:
    ack = await client.request(SelfCheck())
    assert isinstance(ack, Ack)
    assert ack.data["faults"] == []
