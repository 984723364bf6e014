"""Requests over the socket: submitted, answered, aborted with their connection."""

import asyncio
import time

import pytest

from schedtop.control.errors import CommandRefused
from schedtop.control.messages import AbortRequests, Ack, Drain, GetInfo, HoldRequests, Pause, RequestFilter, Resume
from schedtop.control.operations import add_request
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.snapshot import FinishReason


async def test_a_request_is_acknowledged_and_its_tokens_arrive_whole(serve, make_request, collect):
    engine = serve()
    async with engine.client() as client:
        ack = await client.request(make_request("r1", 32, 8))
        assert isinstance(ack, Ack)
        assert ack.did == "queued r1"
        got = await collect(client, "r1")
    assert len(got.tokens["r1"]) == 8
    assert got.ends["r1"] is FinishReason.LENGTH


async def test_a_refused_request_says_why_and_leaves_no_trace(serve, make_request):
    engine = serve(max_model_len=64)
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="the prompt has 65 tokens, the limit is 63"):
            await client.request(make_request("r1", 65))
        snapshot = await engine.snapshot(client)
    assert snapshot.num_waiting == 0
    assert snapshot.counters.added == 0
    assert snapshot.counters.refused == 1


async def test_requests_end_with_the_connection_that_submitted_them(serve, make_request, next_message):
    engine = serve()
    async with engine.client() as watcher:
        async with engine.client() as client:
            await client.request(make_request("gone", 16, 1000))
            assert (await engine.snapshot(watcher)).num_running + (await engine.snapshot(watcher)).num_waiting == 1
        for _ in range(1000):
            snapshot = await engine.snapshot(watcher)
            if not snapshot.num_running and not snapshot.num_waiting:
                break
        assert snapshot.counters.finished == {"abort": 1}
        assert snapshot.pool.free == snapshot.pool.usable


async def test_a32_at_the_next_boundary_after_its_client_is_gone_a_requests_blocks_are_free(
    serve, gated_runner, make_request
):
    engine = serve(gated_runner)
    async with engine.client() as watcher:
        async with engine.client() as client:
            await client.request(make_request("gone", 100, 1000))
            await asyncio.to_thread(gated_runner.entered.acquire)
        while len(engine.server._connections) > 1:
            await watcher.request(GetInfo())
        await watcher.request(GetInfo())  # answered by the server once it has dealt with the one that left
        gated_runner.open()
        snapshot = await engine.snapshot(watcher)
    assert (snapshot.num_running, snapshot.counters.generated_tokens) == (0, 1)
    assert snapshot.step <= 2, "the second only tells the runner"
    assert snapshot.pool.free == snapshot.pool.usable
    assert snapshot.counters.finished == {"abort": 1}


async def test_a_client_gets_only_the_tokens_of_its_own_requests(serve, make_request, collect):
    engine = serve()
    async with engine.client() as one, engine.client() as two:
        await one.request(make_request("one", 16, 5))
        await two.request(make_request("two", 16, 5))
        of_one, of_two = await collect(one, "one"), await collect(two, "two")
    assert set(of_one.tokens) == {"one"}
    assert set(of_two.tokens) == {"two"}


async def test_an_abort_by_somebody_else_reaches_the_one_who_submitted(serve, make_request, collect):
    engine = serve()
    async with engine.client() as owner, engine.client() as operator:
        await owner.request(make_request("long", 16, 1000))
        ack = await operator.request(AbortRequests(select=RequestFilter(ids=["long"]), reason="too long"))
        assert isinstance(ack, Ack)
        assert ack.touched is not None
        assert ack.touched.changed == ["long"]
        got = await collect(owner, "long")
    assert got.ends["long"] is FinishReason.ABORT
    assert got.details["long"] == "too long"


async def test_an_id_in_use_is_refused_and_its_owner_keeps_its_tokens(serve, make_request, collect):
    engine = serve()
    async with engine.client() as owner, engine.client() as other:
        await owner.request(Pause(mode="keep"))
        await owner.request(make_request("same", 16, 200))
        with pytest.raises(CommandRefused, match="in use"):
            await other.request(make_request("same", 16, 3))
        await owner.request(Resume())
        got = await collect(owner, "same")
    assert len(got.tokens["same"]) == 200


def test_a_request_waits_from_the_moment_it_was_received_not_from_the_step_boundary(make_request):
    core = EngineCore(EngineConfig(), FakeRunner(), clock=lambda: 100.0)
    add_request(core, make_request("r1"), received=time.monotonic() - 5)
    (request,) = core.scheduler.waiting
    assert request.arrived <= 95.0


@pytest.mark.parametrize("command", [Resume(), Pause(mode="keep"), Drain()])
async def test_a_shutdown_cant_be_turned_back_and_cuts_nobody_who_may_still_end(
    serve, gated_runner, make_request, collect, command
):
    engine = serve(gated_runner)
    async with engine.client() as client:
        await client.request(make_request("r1", 16, 6))
        await asyncio.to_thread(gated_runner.entered.acquire)
        engine.server.begin_stop(60.0)
        with pytest.raises(CommandRefused, match="the engine is shutting down"):
            await client.request(command)
        gated_runner.open()
        got = await collect(client, "r1")
    assert (len(got.tokens["r1"]), got.ends["r1"]) == (6, FinishReason.LENGTH)


@pytest.mark.parametrize("kind", [AbortRequests, HoldRequests])
async def test_an_empty_prefix_is_refused_instead_of_meaning_everybody(serve, make_request, kind):
    engine = serve()
    async with engine.client() as client:
        await client.request(Pause(mode="keep"))
        await client.request(make_request("r1", 16, 6))
        with pytest.raises(CommandRefused, match="would match every request"):
            await client.request(kind(select=RequestFilter(id_prefix="")))
        assert (await engine.snapshot(client)).num_waiting == 1
