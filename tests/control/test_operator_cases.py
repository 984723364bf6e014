"""Operator cases over the socket: pauses, limits and drains of a running engine."""

import asyncio

import pytest

from schedtop.control.errors import CommandRefused
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AnyCommand,
    Drain,
    DumpSteps,
    GetInfo,
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
    SetMaxTokens,
    SetPriority,
    TokenBatch,
)
from schedtop.engine.snapshot import FinishReason, PauseState, RequestStatus, StepRecord


async def do(client, command: AnyCommand) -> Ack:
    ack = await client.request(command)
    assert isinstance(ack, Ack)
    return ack


async def set_knobs(client, **changes) -> KnobsAck:
    ack = await client.request(SetKnobs(changes=changes))
    assert isinstance(ack, KnobsAck)
    return ack


async def until(engine, client, holds):
    """The first snapshot for which `holds` is true."""
    async with asyncio.timeout(60):
        while not holds(snapshot := await engine.snapshot(client)):
            pass
    return snapshot


async def steps_from(client, first_step):
    ack = await do(client, DumpSteps(count=4096))
    fields = ("step", "budget", "num_running", "num_admitted", "num_resumed")
    places = [StepRecord.__struct_fields__.index(field) for field in fields]
    records = [dict(zip(fields, [record[place] for place in places], strict=True)) for record in ack.data["steps"]]
    return [record for record in records if record["step"] >= first_step]


def only(*ids):
    return RequestFilter(ids=list(ids))


async def test_a20_reserving_output_makes_others_wait_and_switching_it_live_is_for_new_admissions_only(
    serve, brisk_runner, make_request
):
    engine = serve(brisk_runner, num_kv_blocks=65, max_num_seqs=16, knobs={"reserve_output": True})
    small = [f"s{number}" for number in range(8)]
    async with engine.client() as client:
        await client.request(make_request("big", 16, 1000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        for name in small:
            await client.request(make_request(name, 16, 900))
        blocked = await until(engine, client, lambda snapshot: snapshot.num_waiting == 8)
        assert blocked.waiting_by_reason == {"KV blocks": 1, "behind a blocked request": 7}
        assert blocked.pool.free > 40
        before = await set_knobs(client, reserve_output=False)
        started = await until(engine, client, lambda snapshot: snapshot.num_running == 9)
        await set_knobs(client, reserve_output=True)
        still = await until(engine, client, lambda snapshot: snapshot.step > started.step + 3)
        assert started.step >= before.applied_at_step
        assert (still.num_running, still.counters.preemptions) == (9, 0)


async def test_a24_a_lower_share_of_a_step_lets_a_short_prompt_start_with_the_next(serve, gated_runner, make_request):
    engine = serve(gated_runner, max_num_batched_tokens=64, num_kv_blocks=201)
    async with engine.client() as client:
        await client.request(make_request("long", 1024, 4))
        await asyncio.to_thread(gated_runner.entered.acquire)
        adding = asyncio.create_task(client.request(make_request("short", 16, 4)))
        await client.request(GetInfo())  # answered by the server itself, after it has taken what came before
        gated_runner.allow(5)
        for _ in range(5):
            await asyncio.to_thread(gated_runner.entered.acquire)
        setting = asyncio.create_task(set_knobs(client, long_prefill_token_threshold=32))
        await client.request(GetInfo())
        await client.request(GetInfo())
        gated_runner.open()
        ack, _ = await asyncio.gather(setting, adding)
        await until(engine, client, lambda snapshot: snapshot.counters.finished.get("length") == 2)
        records = await steps_from(client, 0)
    started = next(record["step"] for record in records if record["num_admitted"] and record["step"] > 1)
    assert started == ack.applied_at_step == 7


async def is_flushed(client):
    try:
        await do(client, ResetPrefixCache(preempt_running=True))
    except CommandRefused as refusal:
        return "in flight" not in refusal.message
    return True


async def test_a57_no_token_is_lost_to_a_pause_a_flush_and_a_resume(serve, brisk_runner, make_request, collect):
    async def tokens(disturb_at: tuple[int, ...]):
        engine = serve(knobs={"async_scheduling": True})
        async with engine.client() as client:
            await client.request(make_request("r1", 16, 200))
            for count in disturb_at:
                await until(engine, client, lambda snapshot, count=count: snapshot.counters.generated_tokens >= count)
                await do(client, Pause(mode="keep"))
                while not await is_flushed(client):  # a result was in flight: asked again
                    pass
                await do(client, Resume())
            return (await collect(client, "r1")).tokens["r1"]

    undisturbed = await tokens(())
    assert len(undisturbed) == 200
    for disturb_at in ((7,), (8,), (7, 7), (7, 8, 9, 60)):
        assert await tokens(disturb_at) == undisturbed


async def test_a21_holding_the_same_request_twice_reports_the_state_found(serve, brisk_runner, make_request):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 32, 3000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        holds = [await do(client, HoldRequests(select=only("r1"))) for _ in range(3)]
        assert [ack.touched.changed for ack in holds] == [["r1"], [], []]
        found = [ack.touched.found["r1"] for ack in holds]
        assert found == [RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.PREEMPTED]
        assert holds[0].found == "1 running"
        assert holds[1].did.startswith("nothing")
        releases = [await do(client, ReleaseRequests(select=only("r1"))) for _ in range(2)]
        assert [ack.touched.changed for ack in releases] == [["r1"], []]
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        await do(client, PreemptRequests(select=only("r1")))
        assert (await do(client, HoldRequests(select=only("r1")))).touched.changed == ["r1"]
        assert (await do(client, ReleaseRequests(select=only("r1")))).touched.changed == ["r1"]
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        unknown = await do(client, HoldRequests(select=only("never-seen")))
        assert unknown.touched.unknown == ["never-seen"]


async def test_a71_nothing_leaks_after_holds_preemptions_aborts_and_refusals(serve, make_request, collect):
    engine = serve(num_kv_blocks=41)
    async with engine.client() as client:
        names = [f"r{number}" for number in range(24)]
        for number, name in enumerate(names):
            await client.request(make_request(name, 16 + 5 * number, 20))
            if number % 5 == 0:
                await do(client, PreemptRequests(select=RequestFilter(status="running")))
            if number % 7 == 0:
                await do(client, HoldRequests(select=only(name)))
            if number % 4 == 0:
                await do(client, AbortRequests(select=only(f"r{number // 2}")))
        with pytest.raises(CommandRefused):
            await client.request(make_request("too long", 10_000))
        await do(client, ReleaseRequests(select=RequestFilter(id_prefix="r")))
        await collect(client, *names)
        check = await do(client, SelfCheck())
        snapshot = await engine.snapshot(client)
    assert check.data["faults"] == []
    assert snapshot.pool.free == snapshot.pool.usable == 40


async def test_a77_lowering_the_sequence_limit_below_what_runs_cuts_nobody(serve, brisk_runner, make_request):
    engine = serve(brisk_runner, num_kv_blocks=4000)
    async with engine.client() as client:
        for number in range(13):
            await client.request(make_request(f"r{number:02}", 16, 4000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 8)
        lowered = await set_knobs(client, max_num_seqs=2)
        assert any("8 requests are running" in warning for warning in lowered.warnings)
        step = lowered.applied_at_step + 10
        snapshot = await until(engine, client, lambda snapshot: snapshot.step >= step)
        assert (snapshot.num_running, snapshot.num_waiting) == (8, 5)
        assert snapshot.counters.preemptions == 0

        running = [row.request_id for row in snapshot.running]
        ack = await do(client, AbortRequests(select=only(*running[:6])))
        step = ack.applied_at_step + 10
        snapshot = await until(engine, client, lambda snapshot: snapshot.step >= step)
        assert (snapshot.num_running, snapshot.num_waiting) == (2, 5)
        records = await steps_from(client, lowered.applied_at_step)
        assert sum(record["num_admitted"] for record in records) == 0

        await do(client, AbortRequests(select=only(running[6])))
        snapshot = await until(engine, client, lambda snapshot: snapshot.num_waiting == 4)
        assert snapshot.num_running == 2

        raised = await set_knobs(client, max_num_seqs=8)
        step = raised.applied_at_step
        snapshot = await until(engine, client, lambda snapshot: snapshot.step >= step + 1)
        assert (snapshot.num_running, snapshot.num_waiting) == (6, 0)
        assert (await steps_from(client, step))[0]["num_admitted"] == 4


@pytest.mark.parametrize("junk", [9, 0, -1, "8", 2.0, True, 2**40])
async def test_a77_junk_and_more_than_was_allocated_are_refused_and_the_old_value_kept(serve, junk):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="max_num_seqs"):
            await set_knobs(client, max_num_seqs=junk)
        assert (await engine.snapshot(client)).knobs.max_num_seqs == 8


async def test_a79_nothing_new_is_scheduled_after_the_reply_to_pause(serve, brisk_runner, make_request):
    engine = serve(brisk_runner, num_kv_blocks=4000, max_num_seqs=64)
    async with engine.client() as client:
        early = [asyncio.create_task(client.request(make_request(f"a{number}", 16, 50))) for number in range(30)]
        await early[0]
        paused = await do(client, Pause(mode="wait"))
        late = [client.request(make_request(f"b{number}", 16, 50)) for number in range(30)]
        await asyncio.gather(*early, *late)
        drained = await do(client, Drain(limit_s=60.0))
        assert drained.data == {"drained": True, "left": 0}
        snapshot = await engine.snapshot(client)
        assert sum(r["num_admitted"] for r in await steps_from(client, paused.applied_at_step)) == 0
        assert snapshot.num_running == 0
        assert snapshot.num_waiting == snapshot.waiting_by_reason["paused"] >= 30
        await do(client, Resume())
        snapshot = await until(engine, client, lambda snapshot: not snapshot.num_running + snapshot.num_waiting)
        assert snapshot.counters.finished == {"length": 60}


async def test_a79_a_drain_of_a_frozen_engine_returns_with_a_reason(serve, brisk_runner, make_request):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 3000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        await do(client, Pause(mode="keep"))
        with pytest.raises(CommandRefused, match=r"frozen by a pause with 1 requests under way.*resume it first"):
            await client.request(Drain())
        assert (await engine.snapshot(client)).pause is PauseState.PAUSED_ALL


async def test_a_drain_says_what_is_left_when_its_limit_has_passed(serve, brisk_runner, make_request):
    engine = serve(brisk_runner, max_num_seqs=2)
    async with engine.client() as client:
        for number in range(3):
            await client.request(make_request(f"r{number}", 16, 3000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 2)
        ack = await do(client, Drain(limit_s=0.05))
        assert ack.data == {"drained": False, "left": 2}
        assert "2 left: the limit of 0.05 s has passed" in ack.did


async def test_a_drain_ends_when_somebody_resumes(serve, brisk_runner, make_request):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 3000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        drain = asyncio.create_task(do(client, Drain()))
        await until(engine, client, lambda snapshot: snapshot.pause is PauseState.PAUSED_NEW)
        await do(client, Resume())
        assert "running again" in (await drain).did


async def test_a_drain_does_not_wait_for_a_request_that_is_held(serve, brisk_runner, make_request):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 3000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        await do(client, HoldRequests(select=only("r1")))
        ack = await do(client, Drain(limit_s=60.0))
    assert ack.data == {"drained": False, "left": 1}
    assert "held by an operator" in ack.did


async def test_pause_and_resume_are_idempotent_and_tell_what_they_found(serve):
    engine = serve()
    async with engine.client() as client:
        first, second = await do(client, Pause(mode="keep")), await do(client, Pause(mode="keep"))
        assert (first.found, second.found) == ("running", "paused: frozen")
        assert second.did.startswith("nothing")
        first, second = await do(client, Resume()), await do(client, Resume())
        assert (first.found, second.found) == ("paused: frozen", "running")
        assert second.did == "nothing: it was running already"


async def test_pause_with_abort_ends_everything_with_a_final_message(serve, brisk_runner, make_request, collect):
    engine = serve(brisk_runner, max_num_seqs=2)
    async with engine.client() as client:
        names = [f"r{number}" for number in range(5)]
        for name in names:
            await client.request(make_request(name, 16, 3000))
        ack = await do(client, Pause(mode="abort"))
        assert "5 aborted" in ack.did
        got = await collect(client, *names)
        assert set(got.ends.values()) == {FinishReason.ABORT}


async def test_a81_a_flush_while_everything_is_frozen_succeeds_and_loses_no_token(serve, make_request, collect):
    names = [f"r{number}" for number in range(32)]

    async def tokens(disturbed: bool):
        engine = serve(num_kv_blocks=400)
        async with engine.client() as client:
            for name in names:
                await client.request(make_request(name, 20, 30))
            if disturbed:
                await do(client, Pause(mode="keep"))
                flushed = await do(client, ResetPrefixCache(preempt_running=True))
                assert flushed.did == "forgot them all"
                assert (await engine.snapshot(client)).pool.cached == 0
                await do(client, Resume())
            return (await collect(client, *names)).tokens

    assert await tokens(disturbed=True) == await tokens(disturbed=False)


async def test_a_flush_that_cannot_be_says_why(serve, brisk_runner, make_request):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 64, 3000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        with pytest.raises(CommandRefused, match=r"blocks are in use.*preempt_running"):
            await client.request(ResetPrefixCache())


async def test_a83_a_full_queue_refuses_and_lowering_its_limit_drops_nobody(serve, brisk_runner, make_request):
    engine = serve(brisk_runner, knobs={"max_num_seqs": 1, "max_num_queued_reqs": 3})
    async with engine.client() as client:
        await client.request(make_request("runs", 16, 3000))
        await until(engine, client, lambda snapshot: snapshot.num_running == 1)
        outcomes = await asyncio.gather(
            *(client.request(make_request(f"r{number}", 16, 3000)) for number in range(10)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, CommandRefused)]
        assert [error.code for error in refused] == ["queue_full"] * 7
        await set_knobs(client, max_num_queued_reqs=1)
        snapshot = await engine.snapshot(client)
        assert snapshot.num_waiting == 3
        assert snapshot.counters.refused == 7


@pytest.mark.parametrize(("knob", "ceiling"), [("max_num_batched_tokens", 256), ("max_num_seqs", 8)])
async def test_a86_limits_above_what_was_allocated_are_refused_and_the_envelope_can_be_read(serve, knob, ceiling):
    engine = serve()
    async with engine.client() as client:
        (spec,) = (spec for spec in client.welcome.knobs if spec.name == knob)
        assert spec.high == ceiling
        await set_knobs(client, **{knob: ceiling})
        for value in (ceiling + 1, 100 * ceiling):
            with pytest.raises(CommandRefused, match=rf"above its ceiling {ceiling}.*allocated at start"):
                await set_knobs(client, **{knob: value})
        assert getattr((await engine.snapshot(client)).knobs, knob) == ceiling


async def test_a86_a_change_takes_effect_at_the_step_it_names_and_at_no_other(serve, brisk_runner, make_request):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 3000))
        applied = []
        for budget in (200, 100, 50):
            step = applied[-1][0] + 5 if applied else 5
            await until(engine, client, lambda snapshot, step=step: snapshot.step >= step)
            applied.append(((await set_knobs(client, max_num_batched_tokens=budget)).applied_at_step, budget))
        last = applied[-1][0] + 5
        await until(engine, client, lambda snapshot: snapshot.step >= last)
        records = await steps_from(client, 0)
    for record in records:
        expected = [256, *(budget for step, budget in applied if step <= record["step"])][-1]
        assert record["budget"] == expected


async def test_a30_priorities_outside_32_bits_are_refused(serve, make_request):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="lower runs first"):
            await client.request(make_request("r1", priority=2**31))
        with pytest.raises(CommandRefused, match="lower runs first"):
            await client.request(SetPriority(select=only("r1"), priority=-(2**31) - 1))


async def test_requests_are_chosen_by_all_conditions_given_and_none_by_an_empty_filter(
    serve, brisk_runner, make_request
):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await do(client, Pause(mode="keep"))
        for name, priority in (("a1", 1), ("a5", 5), ("b5", 5), ("b9", 9)):
            await client.request(make_request(name, priority=priority))

        async def changed(**conditions):
            ack = await do(client, HoldRequests(select=RequestFilter(**conditions)))
            await do(client, ReleaseRequests(select=RequestFilter(priority_at_least=-9)))
            return sorted(ack.touched.changed)

        assert await changed() == []
        assert await changed(priority_at_least=5) == ["a5", "b5", "b9"]
        assert await changed(priority_at_least=5, priority_at_most=5, id_prefix="b") == ["b5"]
        assert await changed(ids=["a1", "b9"], priority_at_most=1) == ["a1"]
        with pytest.raises(CommandRefused, match="status='asleep' is not one of"):
            await changed(status="asleep")


async def test_a37_an_abort_by_the_parents_id_ends_all_its_sequences_and_leaves_no_name_behind(
    serve, brisk_runner, make_request, collect
):
    engine = serve(brisk_runner)
    names = [f"p-{number}" for number in range(4)]
    async with engine.client("gateway") as gateway, engine.client() as operator:
        for name in names:
            await gateway.request(make_request(name, 16, 3000, parent="p"))
        await gateway.request(make_request("p-9", 16, 3000))  # somebody's own name, no child
        ack = await do(operator, AbortRequests(select=RequestFilter(ids=["p"])))
        assert sorted(ack.touched.changed) == names
        ends = (await collect(gateway, *names)).ends
        assert set(ends.values()) == {FinishReason.ABORT}
        snapshot = await engine.snapshot(operator)
        assert (snapshot.num_running, snapshot.counters.finished["abort"]) == (1, 4)
        again = await do(operator, AbortRequests(select=RequestFilter(ids=["p"])))
        assert (again.touched.changed, again.touched.unknown) == ([], ["p"])
    assert engine.server._owners._owners.keys() <= {"p-9"}


async def test_requests_are_chosen_by_the_token_or_client_that_submitted_them(serve, make_request):
    engine = serve()
    async with engine.client("gateway") as gateway, engine.client("loader") as loader:
        await gateway.request(Pause(mode="keep"))
        for name, token in (("a1", "alice"), ("b1", "bob"), ("a2", "alice")):
            await gateway.request(make_request(name), on_behalf_of=token)
        await loader.request(make_request("l1"))

        async def held(**conditions):
            ack = await do(loader, HoldRequests(select=RequestFilter(**conditions)))
            await do(loader, ReleaseRequests(select=RequestFilter(priority_at_least=-9)))
            return sorted(ack.touched.changed)

        assert await held(submitted_by="alice") == ["a1", "a2"]
        assert await held(submitted_by="alice", ids=["a2", "b1"]) == ["a2"]
        assert await held(submitted_by="loader") == ["l1"]
        assert await held(submitted_by="mallory") == []
        assert await held(submitted_by="mallory", priority_at_least=-9) == []
        await do(loader, AbortRequests(select=RequestFilter(submitted_by="alice")))
        assert await held(submitted_by="alice") == []
        engine.server._capabilities = ["HoldRequests"]
        with pytest.raises(CommandRefused, match="who submitted them isn't known"):
            await loader.request(HoldRequests(select=RequestFilter(submitted_by="alice")))


async def test_max_tokens_of_a_live_request_can_be_changed_but_not_below_what_it_has(
    serve, brisk_runner, make_request, collect
):
    engine = serve(brisk_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 3000))
        await until(engine, client, lambda snapshot: snapshot.counters.generated_tokens >= 10)
        with pytest.raises(CommandRefused, match="below what r1 has generated"):
            await client.request(SetMaxTokens(select=only("r1"), max_tokens=1))
        await do(client, SetMaxTokens(select=only("r1"), max_tokens=500))
        got = await collect(client, "r1")
    assert len(got.tokens["r1"]) == 500


async def test_tokens_never_overtake_the_answer_to_the_request(serve, make_request):
    engine = serve()
    async with engine.client() as client:
        acks = []
        original = client._take

        def take(message):
            if isinstance(message, Ack | TokenBatch):
                acks.append(message)
            original(message)

        client._take = take
        for number in range(20):
            await client.request(make_request(f"r{number}", 16, 1))
    seen: set[str] = set()
    for message in acks:
        if isinstance(message, Ack):
            seen.add(message.did.removeprefix("queued "))
        else:
            assert {output.request_id for output in message.outputs} <= seen


async def test_dumped_steps_are_the_newest_and_their_number_is_bounded(serve, make_request, collect):
    engine = serve()
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 10))
        await collect(client, "r1")
        ack = await do(client, DumpSteps(count=3))
        assert [record[0] for record in ack.data["steps"]] == [8, 9, 10]
        for count in (0, 4097):
            with pytest.raises(CommandRefused, match="outside its range 1 to 4096"):
                await client.request(DumpSteps(count=count))
