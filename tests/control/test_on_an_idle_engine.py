"""Changes and operations on an engine that does nothing: they apply at once, repeat harmlessly, and wake it."""

import asyncio
import contextlib

import pytest

from schedtop.control.errors import CommandRefused
from schedtop.control.messages import (
    AbortRequests,
    Drain,
    HoldRequests,
    Pause,
    PreemptRequests,
    ReleaseRequests,
    RequestFilter,
    ResetPrefixCache,
    Resume,
    SetKnobs,
    SetMaxTokens,
    SetPriority,
)
from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import KNOB_NAMES, initial_knobs, knob_table

SPECS = {spec.name: spec for spec in knob_table(EngineConfig())}


def another(name, value):
    """A legal value of a knob that isn't `value`."""
    spec = SPECS[name]
    match spec.kind:
        case "bool":
            return not value
        case "choice":
            return next(choice for choice in spec.choices if choice != value)
        case "float":
            return value + 0.25
        case _:
            return value - 1 if value > spec.low else value + 1


async def asleep(engine):
    """Until the engine's thread waits for somebody to wake it."""
    async with asyncio.timeout(60):
        while not engine.loop.is_idle:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", KNOB_NAMES)
async def test_every_knob_can_be_turned_and_turned_back_while_nothing_runs(serve, name):
    engine = serve(max_num_speculative_tokens=3)
    start = getattr(initial_knobs(engine.config), name)
    async with engine.client() as client:
        await asleep(engine)
        for before, after in ((start, another(name, start)), (another(name, start), start)):
            ack = await client.request(SetKnobs(changes={name: after}))
            assert (ack.before, ack.after) == ({name: before}, {name: after})
            assert ack.applied_at_step == 1, "the first step that there will be"
            assert getattr((await engine.snapshot(client)).knobs, name) == after


@pytest.mark.parametrize(
    ("knobs", "num_prompt", "way_out"),
    [
        ({"kv_block_limit": 2}, 100, {"kv_block_limit": 0}),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, 100, {"max_num_batched_tokens": 256}),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, 100, {"enable_chunked_prefill": True}),
    ],
)
async def test_an_engine_asleep_beside_a_request_that_cannot_run_wakes_when_a_change_makes_room(
    serve, make_request, collect, knobs, num_prompt, way_out
):
    engine = serve(knobs=knobs)
    async with engine.client() as client:
        await client.request(make_request("r1", num_prompt, 3))
        await asleep(engine)
        assert (await engine.snapshot(client)).num_waiting == 1
        await client.request(SetKnobs(changes=way_out))
        assert len((await collect(client, "r1")).tokens["r1"]) == 3


SELECT = RequestFilter(ids=["r1"])


@pytest.mark.parametrize(
    "command",
    [
        HoldRequests(select=SELECT),
        ReleaseRequests(select=SELECT),
        SetPriority(select=SELECT, priority=4),
        SetMaxTokens(select=SELECT, max_tokens=7),
        PreemptRequests(select=SELECT),
        AbortRequests(select=SELECT),
        Pause(mode="keep"),
        Pause(mode="wait"),
        Pause(mode="abort"),
        Resume(),
        Drain(),
        ResetPrefixCache(preempt_running=True),
    ],
    ids=lambda command: type(command).__name__,
)
async def test_what_is_done_twice_is_done_once_and_both_answers_tell_what_was_found_and_done(
    serve, make_request, command
):
    engine = serve()
    async with engine.client() as client:
        await client.request(Pause(mode="wait"))
        await client.request(make_request("r1"))
        with contextlib.suppress(CommandRefused):
            await client.request(command)
        once = await engine.snapshot(client)
        ack = await client.request(command)
        twice = await engine.snapshot(client)
    assert ack.found and ack.did
    assert not (ack.touched and ack.touched.changed)
    for field in ("pause", "waiting", "num_running", "num_waiting", "counters", "pool", "generation"):
        assert getattr(once, field) == getattr(twice, field), field
