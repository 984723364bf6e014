"""A token's scopes and priority class hold on every way in: OpenAI's routes, control routes, the WebSocket's frames."""

import contextlib
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from schedtop.control.client import Client
from schedtop.control.errors import CommandRefused
from schedtop.control.framing import decode_from_server, encode
from schedtop.control.http import auth
from schedtop.control.http.auth import TokenBook, TokenSpec
from schedtop.control.messages import (
    AbortRequests,
    AddRequest,
    Envelope,
    ErrorReply,
    Hello,
    Pause,
    RequestFilter,
    SetKnobs,
    SetPriority,
    Welcome,
)

ONE = RequestFilter(ids=["r1"])


def request(name: str, priority: int = 0) -> AddRequest:
    return AddRequest(request_id=name, prompt_token_ids=[97] * 16, priority=priority)


@pytest.fixture
def connect(world, monkeypatch):
    """The ordinary client through the gateway, with the token of that name."""

    @contextlib.asynccontextmanager
    async def connect(token: str) -> AsyncIterator[Client]:
        monkeypatch.setenv("SCHEDTOP_TOKEN", f"{token}-token-0123456789")
        async with await Client.connect(world.gateway.url, name="tui") as client:
            yield client

    return connect


async def rows(world, count: int) -> list[dict]:
    """The audit log's newest rows, once there are so many: a gateway's refusal is noted after it was told."""
    found: list[dict] = []
    while len(found) < count:
        found = (await world.send("GET", "/control/v1/audit?limit=50"))[1]["data"]["rows"]
    return found


async def test_a_class_holds_for_changing_priorities_too(world) -> None:
    select = {"ids": ["nobody"]}
    assert (await world.send("POST", "/control/v1/requests/priority", {"select": select, "priority": 5}, "steward"))[
        0
    ] == 200
    status, body = await world.send(
        "POST", "/control/v1/requests/priority", {"select": select, "priority": 4}, "steward"
    )
    assert (status, body["error"]["param"]) == (403, "priority")
    for number in (1 << 31, -(1 << 31) - 1):
        body = {"select": select, "priority": number}
        assert (await world.send("POST", "/control/v1/requests/priority", body, "operator"))[0] == 400
    refused = next(row for row in await rows(world, 4) if row["on_behalf_of"] == "steward")
    assert (refused["outcome"], refused["on_behalf_of"]) == ("refused", "steward")
    assert "priority=4 is outside the range 5 to" in refused["detail"]


async def test_over_the_websocket_nobody_submits_without_the_scope_or_outside_the_class(world, connect) -> None:
    async with connect("steward") as client:
        with pytest.raises(CommandRefused, match="'steward' lacks the scope infer") as refusal:
            await client.request(request("r1", priority=7))
        assert refusal.value.code == "not_allowed"
        with pytest.raises(CommandRefused, match="priority=-1 is outside the range 5 to"):
            await client.request(SetPriority(select=ONE, priority=-1))
        await client.request(SetPriority(select=ONE, priority=6))
    assert (await world.snapshot()).counters.added == 0
    told = [(row["action"], row["outcome"], row["on_behalf_of"]) for row in await rows(world, 3)]
    assert sorted(told) == [
        ("AddRequest", "refused", "steward"), ("SetPriority", "done", "steward"), ("SetPriority", "refused", "steward"),
    ]  # fmt: skip


async def test_over_the_websocket_commands_go_in_the_tokens_name_whatever_they_claim(world, connect) -> None:
    async with connect("operator") as client:
        await client.request(Pause(mode="keep"), on_behalf_of="the night shift")
        await client.request(request("r1"), on_behalf_of="reader")
        mine = AbortRequests(select=RequestFilter(submitted_by="operator"))
        assert (await client.request(mine, on_behalf_of="nobody")).touched.changed == ["r1"]
    found = await rows(world, 2)
    assert {(row["client"], row["on_behalf_of"]) for row in found} == {("tui (http)", "operator")}


async def test_a_read_only_websockets_attempt_has_its_row(world, connect) -> None:
    async with connect("reader") as client:
        with pytest.raises(CommandRefused, match="read-only"):
            await client.request(SetKnobs(changes={"max_num_seqs": 5}))
    (row,) = await rows(world, 1)
    assert (row["action"], row["outcome"], row["on_behalf_of"]) == ("SetKnobs", "refused", "reader")
    assert row["after"] == {"max_num_seqs": 5}


async def test_over_the_websocket_a_misspelt_command_is_answered_under_its_number_and_the_session_goes_on(
    world,
) -> None:
    headers = {"Authorization": "Bearer operator-token-0123456789"}
    misspelt = {"type": "Envelope", "id": 3, "command": {"type": "SetKnobs", "changes": {}, "dry_rum": True}}
    async with world.session.ws_connect("/control/v1/ws", headers=headers) as socket:
        for frame in (encode(Hello(client="x" * 64)), msgspec.msgpack.encode(misspelt)):
            await socket.send_bytes(frame)
        await socket.send_bytes(encode(Envelope(id=4, command=Pause(mode="later"))))  # type: ignore[arg-type]
        answers = [decode_from_server(await socket.receive_bytes()) for _ in range(3)]
        assert isinstance(answers[0], Welcome)
        for number, answer in zip((3, 4), answers[1:], strict=True):
            assert isinstance(answer, ErrorReply)
            assert (answer.id, answer.code) == (number, "bad_frame")
            assert answer.mono > 0 and answer.wall > 1e9
        await socket.send_bytes(encode(Hello(client="again")))
        closing = [await socket.receive() for _ in range(3)]
    assert "Hello was said already" in str(decode_from_server(closing[0].data))
    assert closing[-1].type is aiohttp.WSMsgType.CLOSE


def test_a_token_is_compared_with_every_known_one_in_constant_time(monkeypatch) -> None:
    compared = []
    compare = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: (compared.append(a), compare(a, b))[1])
    specs = [TokenSpec(name=f"t{n}", token=f"{n}-of-a-length-that-will-do", scopes=[]) for n in range(3)]
    assert TokenBook(specs).caller("Bearer 0-of-a-length-that-will-do").name == "t0"
    assert len(compared) == 3, "finding one early must not end the comparison"
