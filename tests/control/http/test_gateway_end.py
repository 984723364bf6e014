"""How the gateway ends: at once when nothing is in flight, in order when much is, and never held up by a client."""

import asyncio
import json

import pytest

STEP_S = 0.003
NEVER_S = 10_000.0
"""A drain that no test could wait for."""


def port_of(world) -> int:
    return int(world.gateway.url.rpartition(":")[2])


async def connection(world, head: bytes) -> asyncio.StreamWriter:
    """A connection on which so much has been sent, and nothing is read."""
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(world))
    writer.write(head)
    await writer.drain()
    return writer


@pytest.mark.timeout(60)
async def test_with_nothing_in_flight_the_end_waits_for_nobody(start_world) -> None:
    """Not for idle connections, half a body, followers of events, nor a WebSocket whose client doesn't answer."""
    world = await start_world(gateway={"drain_limit_s": NEVER_S})
    token = "Authorization: Bearer operator-token-0123456789\r\n"
    upgrade = (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    heads = (
        "",
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 100\r\n\r\n{",
        "GET /v1/models HTTP/1.1\r\nHost: local",
        f"GET /control/v1/ws HTTP/1.1\r\nHost: localhost\r\n{token}{upgrade}\r\n",
        f"GET /control/v1/events HTTP/1.1\r\nHost: localhost\r\n{token}\r\n",
    )
    writers = [await connection(world, head.encode()) for head in heads]
    while not (world.gateway.relay._sockets and world.gateway.control.events.num_followers):
        await world.complete("x", max_tokens=1)
    await world.gateway.shutdown()
    for writer in writers:
        writer.close()


async def streams(world, count: int, **fields) -> list:
    body = {"prompt": "x" * 16, "stream": True, **fields}
    return await asyncio.gather(*(world.post("/v1/completions", body) for _ in range(count)))


async def ends(responses) -> list[str]:
    """The last event of each stream before `[DONE]`."""
    texts = await asyncio.gather(*(response.text() for response in responses))
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    return [text.split("\n\n")[-3] for text in texts]


@pytest.mark.timeout(120)
async def test_fifty_streams_at_the_end_are_told_so_and_a_second_signal_waits_for_none_of_them(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_model_len=4096, gateway={"drain_limit_s": NEVER_S})
    responses = await streams(world, 50, max_tokens=4000)
    shutdown = asyncio.create_task(world.gateway.shutdown())
    await asyncio.sleep(0)
    assert (await world.send("GET", "/ready"))[1]["reason"] == "shutting down"
    assert (await world.complete("late"))[0] == 503
    world.gateway.cut()
    told = await ends(responses)
    await shutdown
    assert all("shutting down" in end for end in told)
    snapshot = await world.until(lambda s: s.num_running + s.num_waiting == 0)
    assert snapshot.counters.finished == {"abort": 50}


@pytest.mark.timeout(120)
async def test_of_fifty_streams_at_the_engines_end_those_that_can_end_whole_and_the_rest_are_told(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_model_len=8192, num_kv_blocks=4000)
    long = await streams(world, 5, max_tokens=8000)
    short = await streams(world, 45, max_tokens=10)
    told = asyncio.Event()
    world.gateway.link.on_update.append(lambda update: told.set() if update.shutting_down else None)
    world.served.server.begin_stop(NEVER_S)
    await told.wait()
    assert (await world.send("GET", "/ready", token=None))[0] == 503
    assert (await world.complete("late"))[0] == 503
    reasons = [json.loads(end[6:])["choices"][0]["finish_reason"] for end in await ends(short)]
    assert reasons == ["length"] * 45
    world.served.server.begin_stop(0.0)
    assert all('"abort"' in end and "shutting down" in end for end in await ends(long))
    assert await asyncio.to_thread(world.served.server.ended.wait, 30)
    assert not world.served.path.exists()


async def test_a_client_that_doesnt_read_its_last_message_holds_up_nobody(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_model_len=4096, gateway={"drain_limit_s": 0.0})
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 4000, "n": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer = await connection(world, f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    await world.until(lambda s: s.num_running == 20)
    await world.gateway.shutdown()
    writer.close()


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n"]
)
async def test_a_client_that_doesnt_speak_http_is_told_so_and_leaves_no_traceback_in_the_log(
    world, caplog, junk
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(world))
    writer.write(junk)
    assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
    writer.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


# ---- clients that are slow to ask ------------------------------------------------------------------------------


async def test_a_body_that_doesnt_come_in_time_is_refused(world, monkeypatch) -> None:
    monkeypatch.setattr("schedtop.control.http.body.BODY_LIMIT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(world))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: 9\r\n\r\n{")
    answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"body_too_slow" in answer
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nHost: loc"])
async def test_a_connection_whose_headers_dont_come_in_time_is_closed(start_world, monkeypatch, sent) -> None:
    monkeypatch.setattr("schedtop.control.http.app.IDLE_LIMIT_S", 0.05)
    world = await start_world()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(world))
    writer.write(sent)
    assert await reader.read() == b""
    writer.close()
