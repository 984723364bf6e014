"""Answers that must follow a schema: what the client hears when its grammar can't be had."""

import asyncio
import json
import threading

import pytest

from schedtop.engine.structured import manager
from schedtop.engine.structured.manager import NUM_WORKERS

BAD, SLOW = "bad", "slow"


class FakeGrammars:
    """Refuses schemas titled `bad`; those titled `slow` take until `let_go`."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_begun = 0

    def compile(self, schema: str):
        self.num_begun += 1
        title = json.loads(schema).get("title")
        if title == BAD:
            raise ValueError("'integr' is no type")
        if title == SLOW:
            self.let_go.wait()
        return object()


def wanting(title: str, number: int = 0, **fields) -> dict:
    schema = {"name": "n", "schema": {"type": "object", "title": title, "minProperties": number}}
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


async def test_fifty_slow_grammars_take_bounded_slots_hold_up_nobody_else_and_their_clients_may_leave(world) -> None:
    slow = [asyncio.create_task(world.complete("x", **wanting(SLOW, number))) for number in range(50)]
    snapshot = await world.until(lambda s: s.num_waiting == 50)
    assert snapshot.waiting_by_reason["grammar compiling"] == 50
    assert (await world.complete("plain", max_tokens=3))[0] == 200
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    snapshot = await world.until(lambda s: s.num_waiting == 0)
    assert snapshot.counters.finished == {"length": 1, "abort": 50}
    assert world.grammars.num_begun <= NUM_WORKERS


async def test_a_grammar_that_takes_too_long_is_the_clients_error_and_nobody_elses(start_world, monkeypatch) -> None:
    monkeypatch.setattr(manager, "TIME_LIMIT_S", 0.1)
    grammars = FakeGrammars()
    world = await start_world(grammars=grammars, step_s=0.003)
    slow = [asyncio.create_task(world.complete("x", **wanting(SLOW, number))) for number in range(50)]
    assert (await world.complete("plain", max_tokens=3))[0] == 200
    answers = await asyncio.gather(*slow)
    grammars.let_go.set()
    assert {(status, body["error"]["code"]) for status, body in answers} == {(400, "grammar_failed")}
    assert "not compiled within 0.1 s" in answers[0][1]["error"]["message"]
    snapshot = await world.until(lambda s: s.num_running + s.num_waiting == 0)
    assert (snapshot.counters.finished, snapshot.pool.in_use) == ({"length": 1, "error": 50}, 0)


async def test_without_a_grammar_backend_a_schema_is_refused_at_once(start_world) -> None:
    world = await start_world()
    status, body = await world.complete("x", **wanting("fine"))
    assert (status, body["error"]["code"]) == (400, "refused")
