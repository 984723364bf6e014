"""Everything the control socket can do, over HTTP: commands, events, the WebSocket, the document."""

import asyncio
import json

import aiohttp
import pytest
from click.testing import CliRunner

from schedtop.cli.main import cli
from schedtop.control.client import Client
from schedtop.control.errors import CommandRefused, Disconnected
from schedtop.control.framing import encode
from schedtop.control.http import events as events_module
from schedtop.control.http.routes import COMMAND_ROUTES
from schedtop.control.messages import AddRequest, AnyCommand, GetInfo, NoteRefusal, SetKnobs, Subscribe
from schedtop.engine.snapshot import EngineCoreEvent, EventKind

STEP_S = 0.003


async def live(world, count: int = 2, **fields) -> list[asyncio.Task]:
    """So many requests that go on for a while, with ids cmpl-r0, cmpl-r1, ..."""
    with world.slow_motion():
        tasks = [
            asyncio.create_task(world.complete("x" * 8, max_tokens=200, request_id=f"r{index}", **fields))
            for index in range(count)
        ]
        await world.until(lambda s: s.num_running + s.num_waiting == count)
    return tasks


def test_every_command_of_the_socket_has_a_path() -> None:
    elsewhere = {Subscribe: "events and ws", AddRequest: "the OpenAI routes", NoteRefusal: "sent by the gateway itself"}
    assert {route.command for route in COMMAND_ROUTES} | elsewhere.keys() == set(AnyCommand.__args__)


async def test_knobs_change_together_or_not_at_all(world) -> None:
    changes = {"max_num_seqs": 3, "max_num_batched_tokens": 99_999}
    status, body = await world.send("PATCH", "/control/v1/knobs", {"changes": changes})
    assert (status, body["error"]["code"]) == (400, "knob_refused")
    assert "2048" in body["error"]["message"]
    assert (await world.snapshot()).generation == 0


@pytest.mark.parametrize("value", [0, -1, "8", 65, 1.5, True])
async def test_a_sequence_limit_that_makes_no_sense_is_refused_and_the_old_one_kept(world, value) -> None:
    status, _ = await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_seqs": value}})
    assert status == 400
    assert (await world.snapshot()).knobs.max_num_seqs == 64


async def test_a_lower_sequence_limit_cuts_nobody_and_admits_nobody_until_there_is_room(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_num_seqs=8)
    with world.slow_motion():
        tasks = await live(world, 13)
        await world.until(lambda s: (s.num_running, s.num_waiting) == (8, 5))
        await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_seqs": 2}})
        snapshot = await world.snapshot()
        assert (snapshot.num_running, snapshot.counters.preemptions) == (8, 0)
    await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_seqs": 8}})
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_a_change_based_on_an_old_state_is_a_conflict(world) -> None:
    change = {"changes": {"max_num_seqs": 3}, "expect_generation": 0}
    assert (await world.send("PATCH", "/control/v1/knobs", change))[0] == 200
    change["changes"] = {"max_num_seqs": 4}
    status, body = await world.send("PATCH", "/control/v1/knobs", change)
    assert (status, body["error"]["type"]) == (409, "conflict_error")


async def test_a_dry_run_a_confirmation_and_an_undo_work_as_on_the_socket(world) -> None:
    change = {"changes": {"max_num_seqs": 3}}
    _, dry = await world.send("PATCH", "/control/v1/knobs", {**change, "dry_run": True})
    assert (dry["dry_run"], (await world.snapshot()).generation) == (True, 0)
    _, receipt = await world.send("PATCH", "/control/v1/knobs", {**change, "confirm_within_s": 60})
    status, _ = await world.send("POST", "/control/v1/knobs/confirm", {"change_id": receipt["change_id"]})
    assert status == 200
    _, undone = await world.send("POST", "/control/v1/knobs/undo", {})
    assert undone["after"] == {"max_num_seqs": 64}


async def test_a_misspelt_field_of_a_command_is_refused(world) -> None:
    for method, path, body in (
        ("PATCH", "/control/v1/knobs", {"changes": {}, "dryrun": True}),
        ("POST", "/control/v1/pause", {"mod": "keep"}),
        ("POST", "/control/v1/pause", {"mode": "now"}),
        ("GET", "/control/v1/steps?cuont=3", None),
        ("GET", "/control/v1/steps?count=three", None),
        ("GET", "/control/v1/steps?count=1&count=2", None),
        ("GET", "/control/v1/requests?sort=nothing", None),
    ):
        status, answer = await world.send(method, path, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), path


async def test_requests_are_listed_held_released_preempted_moved_and_ended(start_world) -> None:
    world = await start_world(step_s=STEP_S, knobs={"policy": "priority"})
    one = {"select": {"ids": ["cmpl-r0"]}}
    with world.slow_motion():
        tasks = await live(world)
        _, held = await world.send("POST", "/control/v1/requests/hold", one)
        assert held["touched"]["changed"] == ["cmpl-r0"]
    _, listed = await world.send("GET", "/control/v1/requests?running_rows=5&waiting_rows=5&detail=cmpl-r0")
    assert [row["request_id"] for row in listed["waiting"]] == ["cmpl-r0"]
    assert listed["detail"]["row"]["wait_reason"] == "held by operator"
    for path, fields in (
        ("release", {}), ("priority", {"priority": 7}), ("preempt", {}), ("max-tokens", {"max_tokens": 199}),
    ):  # fmt: skip
        status, ack = await world.send("POST", f"/control/v1/requests/{path}", {**one, **fields})
        assert (status, "cmpl-r0" in ack["touched"]["found"]) == (200, True), path
    _, ack = await world.send("POST", "/control/v1/requests/abort", {"select": {"priority_at_least": 7}})
    assert ack["touched"]["changed"] == ["cmpl-r0"]
    _, ack = await world.send("POST", "/control/v1/requests/abort", {"select": {"ids": ["nobody"]}})
    assert ack["touched"]["unknown"] == ["nobody"]
    results = await asyncio.gather(*tasks)
    assert [body["choices"][0]["finish_reason"] for _, body in results] == ["abort", "length"]


async def test_what_arrives_during_a_pause_waits_and_says_why(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    status, ack = await world.send("POST", "/control/v1/pause", {"mode": "keep"})
    assert (status, ack["found"]) == (200, "running")
    tasks = [asyncio.create_task(world.complete("x", max_tokens=2)) for _ in range(20)]
    snapshot = await world.until(lambda s: s.num_waiting == 20)
    assert snapshot.waiting_by_reason["paused"] == 20
    status, body = await world.send("GET", "/ready")
    assert (status, body["reason"]) == (503, "paused (all)")
    assert (await world.send("GET", "/health"))[0] == 200
    assert (await world.send("POST", "/control/v1/resume"))[0] == 200
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_a_drain_answers_when_nothing_is_left(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    with world.slow_motion():
        tasks = await live(world)
        await world.until(lambda s: s.num_running == 2)
        _, ack = await world.send("POST", "/control/v1/drain", {"limit_s": 0})
        assert (ack["data"]["drained"], ack["data"]["left"]) == (False, 2)
    _, ack = await world.send("POST", "/control/v1/drain", {})
    assert ack["data"] == {"drained": True, "left": 0}
    assert {status for status, _ in await asyncio.gather(*tasks)} == {200}


async def test_steps_snapshot_audit_info_and_self_check_are_read(world) -> None:
    await world.complete("hello", max_tokens=3)
    assert (await world.send("GET", "/control/v1/self-check"))[1]["data"]["faults"] == []
    assert len((await world.send("GET", "/control/v1/steps?count=2"))[1]["data"]["steps"]) == 2
    assert (await world.send("GET", "/control/v1/snapshot?running_rows=3"))[1]["snapshot"]["num_running"] == 0
    assert (await world.send("GET", "/control/v1/info"))[1]["data"]["info"]["name"] == "schedtop"
    assert (await world.send("POST", "/control/v1/reset-prefix-cache", {}))[0] == 200
    rows = (await world.send("GET", "/control/v1/audit?limit=1"))[1]["data"]["rows"]
    assert rows[0]["action"] == "ResetPrefixCache" and "operator" in str(rows[0])


# ---- events ----------------------------------------------------------------------------------------------------


def event(number: int) -> EngineCoreEvent:
    return EngineCoreEvent(sequence=number, kind=EventKind.QUEUED, step=1, mono=0.0, wall=0.0)


async def test_events_are_told_in_order_and_resumed_after_the_last_one_seen(world) -> None:
    headers = {"Authorization": "Bearer reader-token-0123456789"}
    async with world.session.get("/control/v1/events", headers=headers) as response:
        await world.complete("hello", max_tokens=2)
        kinds, number = [], 0
        async for line in response.content:
            if line.startswith(b"event: "):
                kinds.append(line[7:].decode().strip())
            if line.startswith(b"id: "):
                number = int(line[4:])
            if kinds[-1:] == ["finished"]:
                break
    assert kinds == ["queued", "scheduled", "finished"]
    headers["Last-Event-ID"] = str(number - 1)
    async with world.session.get("/control/v1/events", headers=headers) as response:
        await response.content.readuntil(b"\n\n")
        assert f"id: {number}\n".encode() in await response.content.readuntil(b"\n\n")


async def test_a_follower_that_doesnt_read_loses_the_oldest_and_is_told_how_many() -> None:
    follower = events_module.Follower()
    for number in range(500):
        follower.put(event(number))
    told = (await follower.take()).decode().split("\n\n")
    assert json.loads(told[0].split("data: ")[1]) == {"dropped": 500 - events_module.MAX_QUEUED_EVENTS}
    assert told[1].startswith(f"id: {500 - events_module.MAX_QUEUED_EVENTS}\n")


async def test_the_end_of_a_follower_never_waits_on_its_full_queue() -> None:
    follower = events_module.Follower()
    for number in range(500):
        follower.put(event(number))
    follower.end()
    assert await follower.take() is None


async def test_the_number_of_followers_is_bounded(world, monkeypatch) -> None:
    monkeypatch.setattr("schedtop.control.http.control.MAX_EVENT_STREAMS", 1)
    headers = {"Authorization": "Bearer reader-token-0123456789"}
    async with world.session.get("/control/v1/events", headers=headers) as first:
        assert first.status == 200
        async with world.session.get("/control/v1/events", headers=headers) as second:
            assert (second.status, second.headers["Retry-After"]) == (429, "10")


# ---- the WebSocket ---------------------------------------------------------------------------------------------


@pytest.fixture
def connect(world, monkeypatch):
    """Connect the ordinary client through the gateway, with a token of that name."""

    async def connect(token: str, name: str = "tui", **options) -> Client:
        monkeypatch.setenv("SCHEDTOP_TOKEN", f"{token}-token-0123456789")
        return await Client.connect(world.gateway.url, name=name, **options)

    return connect


async def test_the_ordinary_client_works_through_the_gateway(world, connect) -> None:
    async with await connect("operator") as client:
        assert client.welcome.info == world.gateway.link.welcome.info
        receipt = await client.request(SetKnobs(changes={"max_num_seqs": 5}))
        assert receipt.after == {"max_num_seqs": 5}
        await client.request(Subscribe(interval_s=0.02))
        assert (await anext(client.messages())) is not None
    (row,) = (await world.send("GET", "/control/v1/audit?limit=5"))[1]["data"]["rows"]
    assert (row["client"], row["on_behalf_of"]) == ("tui (http)", "operator")


async def test_a_token_that_may_only_read_gets_a_read_only_session(connect) -> None:
    async with await connect("reader") as client:
        assert client.welcome.read_only
        await client.request(GetInfo())
        with pytest.raises(CommandRefused) as caught:
            await client.request(SetKnobs(changes={"max_num_seqs": 5}))
        assert caught.value.code == "not_allowed"


@pytest.mark.parametrize("token", ["batch", "guessed"])
async def test_a_token_that_may_not_read_gets_no_session(connect, token) -> None:
    with pytest.raises(Disconnected, match=r"40[13]"):
        await connect(token)


@pytest.mark.parametrize("first", [b"", b"\x80", b"junk", encode(GetInfo()), b"\x81" * 100_000])
async def test_whatever_isnt_a_greeting_ends_the_websocket_and_nothing_else(world, first) -> None:
    headers = {"Authorization": "Bearer operator-token-0123456789"}
    async with world.session.ws_connect("/control/v1/ws", headers=headers) as socket:
        await socket.send_bytes(first)
        message = await socket.receive()
    assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.PROTOCOL_ERROR
    assert (await world.send("GET", "/health"))[0] == 200


async def test_commands_of_the_shell_and_the_screens_state_go_through_the_gateway_too(world, monkeypatch) -> None:
    monkeypatch.setenv("SCHEDTOP_TOKEN", "operator-token-0123456789")

    async def shell(*arguments: str) -> dict:
        arguments = (*arguments, "--json", "--connect", world.gateway.url)
        ran = await asyncio.to_thread(CliRunner().invoke, cli, list(arguments))
        assert ran.exit_code == 0, ran.output
        return json.loads(ran.stdout)

    assert (await shell("knobs", "set", "max_num_seqs=5"))["after"] == {"max_num_seqs": 5}
    assert {knob["name"]: knob["value"] for knob in (await shell("knobs"))["knobs"]}["max_num_seqs"] == 5
    assert (await shell("--once"))["snapshot"]["knobs"]["max_num_seqs"] == 5


# ---- the document ----------------------------------------------------------------------------------------------


async def test_the_document_describes_every_path_and_each_knob_with_its_range(world) -> None:
    _, document = await world.send("GET", "/openapi.json", token=None)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in world.gateway.routes()}
    schemas = document["components"]["schemas"]
    knobs = schemas["SetKnobs"]["properties"]["changes"]["properties"]
    for spec in world.core.knob_table:
        described = knobs.pop(spec.name)
        assert (described["description"], described["default"]) == (spec.summary, spec.default)
        assert (described.get("minimum"), described.get("maximum")) == (spec.low, spec.high), spec.name
        assert described.get("enum", []) == list(spec.choices)
    assert knobs == {}
    assert "type" not in schemas["Pause"]["properties"]
    assert {"prompt", "stop", "priority"} <= schemas["CompletionRequest"]["properties"].keys()
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
            assert ("security" in operation) == (operation.get("x-scope") is not None)


async def test_every_reference_in_the_document_leads_somewhere(world) -> None:
    _, document = await world.send("GET", "/openapi.json", token=None)
    names = {part.rpartition("/")[2] for part in _references(document)}
    assert names and names <= document["components"]["schemas"].keys()


def _references(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()
