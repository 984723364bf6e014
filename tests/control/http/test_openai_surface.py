"""OpenAI's API field by field: what is taken, what it does, and what is refused with which words."""

import asyncio
import io
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedtop.control.http.failures import ApiError
from schedtop.control.http.openai_types import ChatRequest, CompletionRequest, parse
from schedtop.engine.runner.fake import FakeRunner


class TellingRunner(FakeRunner):
    """Keeps the settings each request came with, and tells log-probabilities."""

    def __init__(self, next_token) -> None:
        super().__init__(16, next_token)
        self.sampling = {}
        self.adapters = []

    def execute_model(self, scheduler_output):
        for new in scheduler_output.scheduled_new_reqs:
            self.sampling[new.req_id] = new.sampling_params
            self.adapters.append(new.adapter)
        result = super().execute_model(scheduler_output)
        result.logprobs = {
            req_id: [[(token, -0.5), (65, -1.0), (0xE2, -2.0)] for token in tokens]
            for req_id, tokens in zip(scheduler_output.num_scheduled_tokens, result.sampled_token_ids, strict=True)
        }
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params.prompt_logprobs is not None:
                result.prompt_logprobs[new.req_id] = [None, *([(token, -0.25)] for token in new.token_ids[1:])]
        return result


def letters(token_ids: list[int]) -> int:
    return ord("a") + len(token_ids) % 26


@pytest.fixture
async def told(start_world):
    """A world whose runner tells what it was asked."""
    return await start_world(runner=TellingRunner(letters))


async def test_n_gives_so_many_choices_with_seeds_of_their_own(told) -> None:
    status, body = await told.complete("hello", n=3, seed=7, max_tokens=2)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert sorted(params.seed for params in told.runner.sampling.values()) == [7, 8, 9]
    assert body["usage"]["prompt_tokens"] == 5 and body["usage"]["completion_tokens"] == 6


async def test_an_adapter_is_a_model_of_its_own(start_world) -> None:
    world = await start_world(runner=TellingRunner(letters), max_adapters=1, adapters=("poet", "lawyer"))
    _, models = await world.send("GET", "/v1/models")
    assert [(card["id"], card["parent"]) for card in models["data"]] == [
        ("fake", None), ("poet", "fake"), ("lawyer", "fake"),
    ]  # fmt: skip
    status, card = await world.send("GET", "/v1/models/poet")
    assert (status, card["id"]) == (200, "poet")
    for model in ("poet", "fake", None, "lawyer"):
        status, body = await world.complete("hello", model=model, max_tokens=1)
        assert (status, body["model"]) == (200, model or "fake")
    assert world.runner.adapters == ["poet", None, None, "lawyer"]
    status, body = await world.chat(model="pirate")
    assert status == 404 and "'pirate' isn't served here, 'fake', 'poet', 'lawyer' is" in body["error"]["message"]


async def test_several_prompts_are_answered_in_order(told) -> None:
    _, body = await told.complete(["a", "bbb"], n=2, max_tokens=1)
    assert [choice["text"] for choice in body["choices"]] == ["b", "b", "d", "d"]


async def test_token_ids_are_taken_as_prompts(told) -> None:
    _, one = await told.complete([104, 105], max_tokens=1)
    _, two = await told.complete([[104, 105], [104]], max_tokens=1)
    assert one["choices"][0]["text"] == two["choices"][0]["text"] == "c"
    assert len(two["choices"]) == 2


async def test_sampling_fields_reach_the_engine_as_they_are(told) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "min_tokens": 2, "ignore_eos": True, "max_tokens": 4,
        "stop_token_ids": [1, 2], "logit_bias": {"5": -100},
    }  # fmt: skip
    status, _ = await told.complete("x", **fields)
    (params,) = told.runner.sampling.values()
    assert status == 200
    assert params.logit_bias == {5: -100.0} and params.stop_token_ids == (1, 2)
    for name in fields.keys() - {"logit_bias", "stop_token_ids"}:
        assert getattr(params, name) == fields[name], name


async def test_a_json_schema_goes_to_the_engine_as_grammar(start_world) -> None:
    parsed = parse(
        json.dumps({"prompt": "x", "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}}).encode(),
        CompletionRequest,
    )  # fmt: skip
    assert json.loads(parsed.sampling(4).grammar) == {"type": "integer"}
    assert parse(b'{"prompt": "x", "response_format": {"type": "text"}}', CompletionRequest).sampling(4).grammar is None
    with pytest.raises(ApiError, match=r"json_schema\.schema"):
        parse(b'{"prompt": "x", "response_format": {"type": "json_schema"}}', CompletionRequest).sampling(4)


async def test_completion_logprobs_have_the_old_shape(told) -> None:
    _, body = await told.complete("hi", logprobs=2, max_tokens=2)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(body["choices"][0]["text"])
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {body["choices"][0]["text"][0]: -0.5, "A": -1.0}
    assert logprobs["text_offset"] == [0, 1]


async def test_chat_logprobs_have_the_new_shape_with_the_true_bytes(told) -> None:
    _, body = await told.chat(logprobs=True, top_logprobs=3, max_tokens=1)
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -0.5
    assert entry["top_logprobs"][1] == {"token": "A", "logprob": -1.0, "bytes": [65]}
    assert entry["top_logprobs"][2] == {"token": "\ufffd", "logprob": -2.0, "bytes": [0xE2]}


async def test_streamed_logprobs_are_those_of_the_whole_answer(told) -> None:
    fields = {"prompt": "hi", "logprobs": 1, "max_tokens": 5}
    _, whole = await told.complete(**fields)
    async with told.post("/v1/completions", {**fields, "stream": True}) as response:
        lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line)["choices"][0]["logprobs"] for line in lines]
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [item for chunk in chunks for item in chunk[field]] == whole["choices"][0]["logprobs"][field]


async def test_echo_puts_the_prompt_in_front(told) -> None:
    _, body = await told.complete("hello", echo=True, max_tokens=1)
    assert body["choices"][0]["text"] == "hellof"
    _, body = await told.complete([104, 105], echo=True, max_tokens=1)
    assert body["choices"][0]["text"] == "hic"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_tells_the_prompts_too(told, stream) -> None:
    fields = {"prompt": "h\u00ef", "echo": True, "logprobs": 1, "max_tokens": 2}
    await told.complete(**fields)
    async with told.post("/v1/completions", {**fields, "stream": stream}) as response:
        text = await response.text()
    bodies = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    choices = [body["choices"][0] for body in bodies]
    merged = {key: [x for choice in choices for x in choice["logprobs"][key]] for key in choices[0]["logprobs"]}
    assert "".join(choice["text"] for choice in choices) == "h\u00efde"
    assert merged["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
    assert merged["tokens"] == ["h", "\ufffd", "\ufffd", "d", "e"]
    assert merged["text_offset"] == [0, 1, 1, 2, 3]
    assert (merged["top_logprobs"][0], merged["top_logprobs"][3]) == (None, {"d": -0.5})


async def test_usage_comes_in_a_last_chunk_of_its_own_if_asked_for(told) -> None:
    body = {"prompt": "hi", "stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}
    async with told.post("/v1/completions", body) as response:
        lines = [json.loads(line[6:]) for line in (await response.text()).splitlines() if line.startswith("data: {")]
    assert lines[-1]["choices"] == [] and lines[-1]["usage"]["total_tokens"] == 5
    assert all("usage" not in line for line in lines[:-1])


async def test_cached_prompt_tokens_are_told(told) -> None:
    prompt = "x" * 40
    await told.complete(prompt, max_tokens=1)
    _, body = await told.complete(prompt, max_tokens=1)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_the_end_token_ends_the_answer_and_isnt_shown(start_world) -> None:
    world = await start_world(next_token=lambda tokens: 0 if len(tokens) >= 7 else ord("k"), eos=(0,))
    _, body = await world.complete("hello", max_tokens=10)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("kk", "stop")
    assert body["usage"]["completion_tokens"] == 3


async def test_a_chat_may_go_on_until_the_context_is_full(start_world) -> None:
    world = await start_world(max_model_len=64)
    _, body = await world.chat()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 64


async def test_text_parts_are_joined_and_other_parts_refused(world) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    status, _ = await world.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert status == 200
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    status, body = await world.chat(messages=[{"role": "user", "content": image}])
    assert (status, body["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": "many"}, "max_tokens", "int"),
        ({"n": 0}, "n", "1 to 128"),
        ({"n": 1000}, "n", "1 to 128"),
        ({"temperature": -1}, "temperature", "0.0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"presence_penalty": 3}, "presence_penalty", "2.0"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"priority": "high"}, "priority", "int"),
        ({"priority": 1.5}, "priority", "int"),
        ({"priority": 1 << 31}, "priority", "lower runs first"),
        ({"priority": -(1 << 31) - 1}, "priority", "lower runs first"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
        ({"stop": [""]}, "stop", "1 to"),
        ({"best_of": 4}, "best_of", "n=4"),
        ({"suffix": "x"}, "suffix", "supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"max_tokns": 3}, "max_tokns", "max_tokens"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt", "neither"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": {"a": 1}}, "prompt", "str"),
        ({"prompt": ["a"] * 100, "n": 6}, "n", "512"),
        ({"request_id": "a\nb"}, "request_id", "printable"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ],
)
async def test_a_field_out_of_range_is_named_with_its_limits(world, fields, param, words) -> None:
    status, body = await world.complete(**{"prompt": "x", **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert words in body["error"]["message"]
    assert (await world.snapshot()).counters.added == 0


@pytest.mark.parametrize("priority", [-100, 0, 5, None])
async def test_priorities_in_range_reach_the_queue_lower_first(start_world, priority) -> None:
    world = await start_world(knobs={"policy": "priority"})
    await world.send("POST", "/control/v1/pause", {"mode": "keep"})
    asked = {"middle": 0, "least": 6, "most": -101, "asked": priority}
    fields = [{"request_id": name} | ({} if at is None else {"priority": at}) for name, at in asked.items()]
    answers = []
    for number, extra in enumerate(fields, start=1):
        answers.append(asyncio.create_task(world.complete(max_tokens=1, **extra)))
        await world.until(lambda s, number=number: s.num_waiting == number)
    order = sorted(asked, key=lambda name: (asked[name] or 0, name == "asked"))
    assert [row.request_id.split("-")[1] for row in (await world.snapshot()).waiting] == order
    await world.send("POST", "/control/v1/resume")
    assert {status for status, _ in await asyncio.gather(*answers)} == {200}


@pytest.mark.parametrize("field", ["seed", "top_k", "max_tokens", "priority"])
async def test_a_number_beyond_64_bits_is_a_bad_request(world, field) -> None:
    assert (await world.complete(**{field: 1 << 70}))[0] == 400


async def test_a_text_too_long_to_tokenise_beside_others_is_refused(world, monkeypatch) -> None:
    monkeypatch.setattr("schedtop.control.http.tokens.MAX_CHARACTERS", 10)
    for body in ({"prompt": "x" * 11}, {"messages": [{"role": "user", "content": "x" * 6}] * 2}):
        status, answer = await world.send("POST", "/tokenize", body)
        assert (status, answer["error"]["message"].endswith("the limit is 10: send it in parts")) == (400, True)


async def test_another_models_name_isnt_found(world) -> None:
    status, body = await world.complete(model="gpt-9")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"prompt": "x", "n": NaN}'])
async def test_a_body_that_is_no_json_object_is_a_bad_request(world, body) -> None:
    headers = {"Content-Type": "application/json"}
    async with world.session.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ("Content-Length: 99999999999\r\n", 413, b"99999999999 bytes"),
        ("Content-Encoding: gzip\r\nContent-Length: 2\r\n", 415, b"as it is"),
    ],
)
async def test_a_body_that_can_never_be_taken_is_refused_before_it_comes(world, headers, status, words) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.gateway.url.rpartition(":")[2]))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}\r\n"
    writer.write(head.encode())
    answer = await reader.readuntil(b"}}")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert words in answer
    writer.close()


async def test_a_prompt_far_too_long_is_refused_without_troubling_the_engine(world) -> None:
    for prompt, words in (("x" * 100_000, "at least 4096 tokens"), ([97] * 600, "has 600 tokens")):
        status, body = await world.complete(prompt)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert words in body["error"]["message"] and "the limit is 255" in body["error"]["message"]
    status, body = await world.chat(messages=[{"role": "user", "content": "x" * 100_000}])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert (await world.snapshot()).counters.refused == 0


async def _in_pieces() -> AsyncIterator[bytes]:
    """17 MiB whose length isn't told before."""
    for _ in range(17):
        yield b" " * (1 << 20)


@pytest.mark.parametrize("body", [lambda: io.BytesIO(b" " * (17 << 20)), _in_pieces])
async def test_a_body_beyond_the_limit_is_too_large(world, body) -> None:
    headers = {"Content-Type": "application/json"}
    async with world.session.post("/v1/completions", data=body(), headers=headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"


async def test_unknown_paths_and_methods_answer_in_the_same_shape(world) -> None:
    assert (await world.send("GET", "/v1/nothing"))[1]["error"]["code"] == "http_404"
    async with world.session.get("/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


@pytest.mark.parametrize("budget", [2048, 256])
async def test_a_prompt_bigger_than_the_pool_is_refused_and_those_behind_it_served(start_world, budget) -> None:
    world = await start_world(num_kv_blocks=50, max_model_len=2048, max_num_batched_tokens=budget)
    status, body = await world.complete("x" * 1002, max_tokens=50)
    assert status == 400 and "784" in body["error"]["message"]
    assert (await world.complete("y" * 8, max_tokens=4))[0] == 200
    snapshot = await world.until(lambda s: s.pool.free == s.pool.usable)
    assert (snapshot.num_waiting, snapshot.counters.refused) == (0, 1)


async def test_one_token_over_the_models_length_is_refused_and_leaves_no_trace(start_world) -> None:
    world = await start_world(max_model_len=128)
    status, body = await world.complete("x" * 129, max_tokens=1)
    assert status == 400 and "127" in body["error"]["message"]
    assert (await world.complete("x" * 128, max_tokens=1))[0] == 400
    status, body = await world.complete("x" * 127, max_tokens=2)
    assert (status, body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == (200, "length", 1)
    for _ in range(10):
        assert (await world.complete("x" * 16, max_tokens=4))[0] == 200
    snapshot = await world.snapshot()
    assert (snapshot.num_waiting, snapshot.counters.refused, snapshot.counters.added) == (0, 2, 11)


async def test_a_prompt_too_long_is_refused_with_the_code_that_clients_know(world) -> None:
    status, body = await world.complete(["short", "x" * 300])
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    snapshot = await world.until(lambda s: s.num_running + s.num_waiting == 0)
    assert (snapshot.counters.refused, snapshot.pool.in_use) == (1, 0)


async def test_text_and_messages_are_tokenised_and_tokens_made_text_again(world) -> None:
    status, body = await world.send("POST", "/tokenize", {"model": "fake", "prompt": "h\u00ef"}, token=None)
    assert (status, body) == (200, {"count": 3, "max_model_len": 256, "tokens": [104, 195, 175], "token_strs": None})
    _, chat = await world.send("POST", "/tokenize", {
        "messages": [{"role": "user", "content": "hi"}], "return_token_strs": True})  # fmt: skip
    assert "".join(chat["token_strs"]) == "user: hi\nassistant: "
    _, back = await world.send("POST", "/detokenize", {"model": "fake", "tokens": body["tokens"]})
    assert back == {"prompt": "h\u00ef"}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "either a prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user"}]}, "either a prompt or messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "isn't served here"),
        ("/detokenize", {"tokens": [-1]}, ">= 0"),
        ("/detokenize", {"tokens": "x"}, "array"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cant_be_tokenised_is_refused_by_name(world, path, body, words) -> None:
    status, answer = await world.send("POST", path, body)
    assert status in (400, 404)
    assert words in answer["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(set(CompletionRequest.__struct_fields__))), JSON, max_size=5), JSON)
def test_whatever_is_sent_is_either_taken_or_refused_with_400(fields, prompt) -> None:
    for kind, extra in ((CompletionRequest, {"prompt": prompt}), (ChatRequest, {"messages": prompt})):
        assert _status(json.dumps({**fields, **extra}).encode(), kind) in (200, 400)


def _status(body: bytes, kind) -> int:
    try:
        request = parse(body, kind)
        request.sampling(16)
        _ = request.prompts() if isinstance(request, CompletionRequest) else request.plain_messages()
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/control/v1/pause"])
async def test_json_nested_too_deeply_is_the_clients_fault(world, path) -> None:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer operator-token-0123456789"}
    async with world.session.post(path, data='{"mode": ' + "[" * 5000 + "]" * 5000 + "}", headers=headers) as response:
        body = await response.json()
    assert response.status == 400
    assert body["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"request_id": "a\nb"}, r"request_id='a\nb' must have"),
        ({"request_id": "x" * 200}, "request_id has 200 characters"),
        ({"stop": ["a", ""]}, "stop='' must be"),
        ({"stop": ["a"] * 40}, "stop has 40 strings"),
        ({"stop": "a" * 2000}, "stop has a string of 2000 characters"),
    ],
)
async def test_a_refusal_shows_the_value_and_not_its_length_as_the_value(world, fields, words) -> None:
    status, body = await world.complete("hi", **fields)
    assert status == 400
    assert words in body["error"]["message"]
    assert f"{next(iter(fields))}=" not in body["error"]["message"] or "='" in body["error"]["message"]


async def test_a_number_too_large_for_json_says_so_and_content_of_a_wrong_kind_names_it(world) -> None:
    headers = {"Content-Type": "application/json"}
    async with world.session.post("/v1/completions", data='{"prompt": "x", "min_p": 1e400}', headers=headers) as answer:
        body = await answer.json()
    assert answer.status == 400
    assert body["error"]["message"].startswith("a number is too large")
    status, body = await world.chat(messages=[{"role": "user", "content": 7}])
    assert (status, body["error"]["message"]) == (
        400, "messages: the content 7 is neither a text nor a list of text parts",
    )  # fmt: skip
