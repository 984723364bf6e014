"""The gateway in one piece: an OpenAI client talks to an engine with a fake runner."""

import json

import openai
import pytest


def expected(num_prompt: int, count: int) -> str:
    return "".join(chr(ord("a") + (num_prompt + i) % 26) for i in range(count))


async def test_a_completion_is_what_the_engine_sampled(world) -> None:
    status, body = await world.complete("hello", max_tokens=4)
    assert status == 200
    assert body["choices"][0]["text"] == expected(5, 4)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


@pytest.fixture
async def client(world):
    async with openai.AsyncOpenAI(base_url=f"{world.gateway.url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_the_official_client_lists_the_model(client) -> None:
    models = await client.models.list()
    assert [model.id for model in models.data] == ["fake"]
    assert (await client.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_the_official_client_completes_streaming_and_not(client) -> None:
    whole = await client.completions.create(model="fake", prompt="hello", max_tokens=6)
    stream = await client.completions.create(model="fake", prompt="hello", max_tokens=6, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == expected(5, 6)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_official_client_chats_streaming_and_not(client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=5)
    stream = await client.chat.completions.create(
        model="fake", messages=messages, max_completion_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 5


async def test_health_and_readiness_say_yes_before_a_working_engine(world) -> None:
    for path in ("/health", "/ready"):
        async with world.session.get(path) as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_metrics_show_what_was_done(world) -> None:
    await world.complete("hello", max_tokens=4)
    async with world.session.get("/metrics") as response:
        page = await response.text()
    assert 'vllm:generation_tokens_total{engine="0",model_name="fake"} 4.0' in page
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in page


async def test_knobs_are_read_and_changed_with_the_operators_token(world) -> None:
    headers = {"Authorization": "Bearer operator-token-0123456789"}
    async with world.session.patch(
        "/control/v1/knobs", json={"changes": {"max_num_seqs": 3}}, headers=headers
    ) as response:
        receipt = await response.json()
    assert (response.status, receipt["after"]) == (200, {"max_num_seqs": 3})
    async with world.session.get("/control/v1/knobs", headers=headers) as response:
        assert (await response.json())["values"]["max_num_seqs"] == 3


async def test_a_prompt_longer_than_the_model_is_a_bad_request_that_names_the_limit(world) -> None:
    status, body = await world.complete("x" * 300)
    assert status == 400
    assert "255" in body["error"]["message"]
    assert body["error"]["param"] == "prompt"


async def test_a_stream_ends_with_done(world) -> None:
    async with world.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}) as response:
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    assert all(json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {"))
