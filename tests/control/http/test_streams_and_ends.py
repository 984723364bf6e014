"""How streams run and end: whole characters, stop strings, clients that leave or don't read, ids used twice."""

import asyncio
import json
import logging
import threading

import aiohttp
import pytest

from schedtop.control.http import link, sse
from schedtop.control.http.answer import Response
from schedtop.control.messages import AbortRequests, GetInfo, RequestFilter, TokenOutput
from schedtop.engine.snapshot import FinishReason

STEP_S = 0.003
TEXTS = ["🙂 hi", "👨‍👩‍👧‍👦", "한국어 문장", "ďalší", "日本語 naïve"]


async def events(response) -> list[dict]:
    text = await response.text()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def says(text: str, num_prompt: int = 2):
    answer = text.encode()
    return lambda tokens: answer[len(tokens) - num_prompt] if len(tokens) - num_prompt < len(answer) else 0


async def stream_text(world, **fields) -> tuple[str, dict]:
    async with world.post("/v1/completions", {"prompt": "hi", "stream": True, **fields}) as response:
        chunks = await events(response)
    return "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks[-1]["choices"][0]


@pytest.mark.parametrize("text", TEXTS)
async def test_characters_of_several_tokens_arrive_whole(start_world, text) -> None:
    world = await start_world(next_token=says(text), eos=(0,))
    shown, last = await stream_text(world, max_tokens=100)
    assert (shown, last["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("max_tokens", range(1, 9))
async def test_a_character_cut_by_max_tokens_shows_as_one_replacement_at_the_end(start_world, max_tokens) -> None:
    world = await start_world(next_token=says("a🙂b🙂"), eos=(0,))
    shown, last = await stream_text(world, max_tokens=max_tokens)
    _, whole = await world.complete("hi", max_tokens=max_tokens)
    assert shown == whole["choices"][0]["text"] == "a🙂b🙂".encode()[:max_tokens].decode(errors="replace")
    assert shown.count("\ufffd") <= 1
    assert last["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_character_cut_by_an_abort_shows_as_one_replacement_at_the_end(start_world, stream) -> None:
    is_half, may_go_on = threading.Event(), threading.Event()

    def next_token(tokens: list[int]) -> int:
        place = len(tokens) - 2
        if place == 2:  # the third byte: one more will be missing
            is_half.set()
            may_go_on.wait()
        return "a🙂b".encode()[place]

    world = await start_world(next_token=next_token)
    answering = asyncio.create_task(
        world.post("/v1/completions", {"prompt": "hi", "max_tokens": 6, "stream": stream}).__aenter__()
    )
    await asyncio.to_thread(is_half.wait)
    aborting = asyncio.create_task(world.client.request(AbortRequests(select=RequestFilter(id_prefix="cmpl-"))))
    await world.client.request(GetInfo())  # answered by the server itself, which has the abort by now
    may_go_on.set()
    await aborting
    response = await answering
    chunks = await events(response) if stream else [await response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a\ufffd"
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("stop", "shown", "reason"),
    [(["END"], "some ", "stop"), (["ab", "END"], "some ", "stop"), (["ENDX"], "some END of it", "length")],
)
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_over_token_borders_leaks_nothing_and_counts_as_stop(
    start_world, stop, shown, reason, include
) -> None:
    world = await start_world(next_token=says("some END of it"), step_s=STEP_S)
    fields = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 200 if reason == "stop" else 14}
    streamed, last = await stream_text(world, **fields)
    _, whole = await world.complete("hi", **fields)
    expected = shown + ("END" if include and reason == "stop" else "")
    assert streamed == whole["choices"][0]["text"] == expected
    assert last["finish_reason"] == whole["choices"][0]["finish_reason"] == reason
    snapshot = await world.until(lambda s: s.num_running == 0)
    assert snapshot.counters.finished.get(reason) == 2
    assert snapshot.counters.finished.get(FinishReason.ABORT, 0) == 0


async def test_a_client_that_leaves_a_stream_frees_its_blocks_for_the_next(start_world) -> None:
    world = await start_world(step_s=STEP_S, max_num_seqs=1, max_model_len=4096)
    free = (await world.snapshot()).pool.free
    response = await world.post("/v1/completions", {"prompt": "x" * 16, "stream": True, "max_tokens": 1000})
    await response.content.readuntil(b"\n\n")
    response.close()
    snapshot = await world.until(lambda s: s.pool.free == free and s.num_running == 0)
    assert snapshot.counters.finished == {"abort": 1}
    assert (await world.complete("hello", max_tokens=2))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_prefill_ends_its_request(start_world, stream) -> None:
    world = await start_world(step_s=STEP_S, max_model_len=8192, max_num_batched_tokens=256)
    with world.slow_motion():
        request = asyncio.create_task(world.complete("x" * 4096, max_tokens=10, stream=stream))
        await world.until(lambda s: s.num_running == 1)
        request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    snapshot = await world.until(lambda s: s.num_running == 0)
    assert snapshot.counters.finished == {"abort": 1}
    assert snapshot.pool.in_use == 0


async def test_leaving_a_request_for_four_answers_ends_all_four(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    response = await world.post("/v1/completions", {"prompt": "x" * 16, "n": 4, "stream": True, "max_tokens": 200})
    await response.content.readuntil(b"\n\n")
    response.close()
    snapshot = await world.until(lambda s: s.num_running + s.num_waiting == 0)
    assert snapshot.counters.finished == {"abort": 4}
    assert not world.gateway.link._streams


async def test_aborting_the_parents_id_ends_all_its_answers(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    response = await world.post(
        "/v1/completions", {"prompt": "x", "n": 4, "stream": True, "max_tokens": 200, "request_id": "mine"}
    )
    status, ack = await world.send("POST", "/control/v1/requests/abort", {"select": {"ids": ["cmpl-mine"]}})
    assert (status, len(ack["touched"]["changed"])) == (200, 4)
    ends = [choice["finish_reason"] for chunk in await events(response) for choice in chunk["choices"]]
    assert [end for end in ends if end] == ["abort"] * 4
    assert (await world.snapshot()).counters.finished == {"abort": 4}


async def test_an_operators_abort_on_the_socket_ends_the_stream_with_its_reason(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    response = await world.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 200})
    await world.client.request(AbortRequests(select=RequestFilter(id_prefix="cmpl-"), reason="making room"))
    last = (await events(response))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("abort", "making room")


async def test_the_same_request_id_twice_is_a_conflict_and_may_be_used_again_later(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    with world.slow_motion():
        first = asyncio.create_task(world.complete("x", max_tokens=100, request_id="same"))
        await world.until(lambda s: s.num_running + s.num_waiting == 1)
        status, body = await world.complete("y", request_id="same")
    assert (status, body["error"]["code"]) == (409, "id_in_use")
    assert (await first)[1]["choices"][0]["text"].startswith("bcd")
    assert (await world.complete("y", request_id="same", max_tokens=1))[0] == 200
    assert (await world.snapshot()).counters.refused == 0


async def test_an_error_of_the_engine_inside_a_stream_is_told_in_the_stream(start_world) -> None:
    def breaks(tokens: list[int]) -> int:
        if len(tokens) > 4:
            raise RuntimeError("no such kernel")
        return 97

    world = await start_world(next_token=breaks)
    async with world.post("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 9}) as response:
        chunks = await events(response)
    assert "no such kernel" in chunks[-1]["error"]["message"]
    status, body = await world.complete("hi", max_tokens=9)
    assert (status, body["error"]["type"]) == (500, "server_error")


async def test_a_fault_of_the_gateway_inside_a_stream_is_told_there_without_details(world, monkeypatch, caplog) -> None:
    def breaks(self, delta, options):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Response, "_chunk", breaks)
    async with world.post("/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 9}) as response:
        text = await response.text()
    assert "its log says how" in text and "a bug of ours" not in text
    assert text.endswith("data: [DONE]\n\n")
    assert "a bug of ours" in caplog.text
    await world.until(lambda s: s.num_running + s.num_waiting == 0)


async def test_a_stream_that_nobody_takes_from_is_cut_past_its_bound() -> None:
    cut = asyncio.Event()
    stream = link.TokenStream(on_cut=cut.set)
    for _ in range(link.MAX_PENDING_VALUES):
        stream.put(TokenOutput("r", [97]))
    assert not cut.is_set()
    stream.put(TokenOutput("r", [97]))
    assert cut.is_set()
    with pytest.raises(link.SlowReader, match="65536"):
        await stream.take()


async def test_a_client_that_stops_reading_is_cut_and_its_requests_ended(start_world, monkeypatch) -> None:
    stalled = asyncio.Event()

    async def never_written(self, data: bytes) -> None:
        stalled.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(link, "MAX_PENDING_VALUES", 50)
    monkeypatch.setattr(sse.EventStream, "send", never_written)
    world = await start_world(step_s=STEP_S)
    response = await world.post("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 200, "n": 4})
    await stalled.wait()
    snapshot = await world.until(lambda s: s.num_running + s.num_waiting == 0)
    assert snapshot.counters.finished == {"abort": 4}
    response.close()


async def test_a_client_that_drops_a_stream_is_no_error_and_an_ended_request_is_not_aborted(
    start_world, monkeypatch, caplog
) -> None:
    world = await start_world()
    sent = []

    async def dropped(self, data: bytes) -> None:
        streams = list(world.gateway.link._streams.values())  # none if it has ended already
        while not all(stream.ended for stream in streams):  # noqa: ASYNC110
            await asyncio.sleep(0)
        raise ConnectionResetError("gone")

    monkeypatch.setattr(sse.EventStream, "send", dropped)
    monkeypatch.setattr(world.gateway.link, "send_soon", lambda command, on_behalf_of="": sent.append(command))
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 5}
    response = await world.post("/v1/chat/completions", body)
    with pytest.raises(aiohttp.ClientError):
        await response.read()
    assert (await world.snapshot()).counters.finished == {"length": 1}
    assert sent == []
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_joined_tokens_of_a_slow_stream_lose_nothing(start_world) -> None:
    world = await start_world(step_s=STEP_S)
    response = await world.post("/v1/completions", {"prompt": "hello", "stream": True, "max_tokens": 30})
    await world.until(lambda s: s.num_running == 0)
    text = "".join(chunk["choices"][0]["text"] for chunk in await events(response))
    assert text == "".join(chr(97 + (5 + index) % 26) for index in range(30))


async def test_outputs_are_the_same_however_small_the_pool_and_the_steps_are(start_world) -> None:
    """Greedy answers of two requests, alone or with preemptions."""
    expected = ["".join(chr(97 + (32 + index) % 26) for index in range(40))] * 2
    world = await start_world(num_kv_blocks=7, max_num_batched_tokens=64)
    answers = await asyncio.gather(*(world.complete(letter * 32, max_tokens=40) for letter in "xy"))
    assert [body["choices"][0]["text"] for _, body in answers] == expected
    streams = await asyncio.gather(*(stream_text(world, prompt=letter * 32, max_tokens=40) for letter in "xy"))
    assert [text for text, _ in streams] == expected
    assert (await world.snapshot()).counters.preemptions > 0
