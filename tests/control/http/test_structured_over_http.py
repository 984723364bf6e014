"""Answers that must follow a schema: what the client hears when its grammar can't be had."""

import asyncio
import json
import threading

import pytest

BAD, SLOW = "bad", "slow"


class FakeGrammars:
    """Refuses schemas titled `bad`; those titled `slow` take until `let_go`."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def compile(self, schema: str):
        title = json.loads(schema).get("title")
        if title == BAD:
            raise ValueError("'integr' is no type")
        if title == SLOW:
            self.let_go.wait()
        return object()


def wanting(title: str, **fields) -> dict:
    schema = {"name": "n", "schema": {"type": "object", "title": title}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}, **fields}


@pytest.fixture
async def world(start_world):
    grammars = FakeGrammars()
    started = await start_world(grammars=grammars, step_s=0.003)
    started.grammars = grammars
    yield started
    grammars.let_go.set()


async def test_a_schema_that_doesnt_compile_is_the_clients_error(world) -> None:
    status, body = await world.complete("x", **wanting(BAD))
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "grammar_failed", "response_format")
    assert "'integr' is no type" in body["error"]["message"]
    assert (await world.complete("x", max_tokens=1))[0] == 200


async def test_slow_grammars_hold_up_nobody_else_and_their_clients_may_leave(world) -> None:
    slow = [asyncio.create_task(world.complete("x", **wanting(SLOW))) for _ in range(20)]
    snapshot = await world.until(lambda s: s.num_waiting == 20)
    assert snapshot.waiting_by_reason["grammar compiling"] == 20
    assert (await world.complete("plain", max_tokens=3))[0] == 200
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    snapshot = await world.until(lambda s: s.num_waiting == 0)
    assert snapshot.counters.finished == {"length": 1, "abort": 20}


async def test_without_a_grammar_backend_a_schema_is_refused_at_once(start_world) -> None:
    world = await start_world()
    status, body = await world.complete("x", **wanting("fine"))
    assert (status, body["error"]["code"]) == (400, "refused")
