"""The OpenAI-compatible routes: models, completions, chat completions, streaming and not.

From HTTP to a `Plan`; fields are checked in `openai_types.py`, tokens followed in `generation.py`, shapes made in
`render.py`, responses written in `answer.py`.
"""

import asyncio
import uuid
from typing import Any

import msgspec
from aiohttp import web

from schedtop.control.errors import CommandRefused
from schedtop.control.http.answer import Response
from schedtop.control.http.as_json import json_response
from schedtop.control.http.auth import Caller
from schedtop.control.http.body import body_of
from schedtop.control.http.failures import ApiError
from schedtop.control.http.generation import Generation, Plan
from schedtop.control.http.keys import CALLER
from schedtop.control.http.openai_types import ChatRequest, CommonRequest, CompletionRequest, StreamOptions, parse
from schedtop.control.http.render import ChatShape, CompletionShape, Renderer, Shape
from schedtop.control.http.service import Service
from schedtop.control.http.text import Tokenizer
from schedtop.control.messages import EngineInfo

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as OpenAI and vLLM have it."""
MAX_ANSWERS = 512
"""Answers of one HTTP request: prompts times `n`."""
MAX_OVERLENGTH = 2
"""Times the model's length: longer prompts are refused here, for reading them would cost the engine steps."""
PROBED_CHARACTERS = 16
"""Per token that fits: of a longer text so much is tokenised first, which mostly tells that it is too long."""
LONG_TEXT = 4_000
"""Characters from which a text is tokenised off the event loop."""


class OpenAiRoutes:
    """Handlers; all they need is in the service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, request: web.Request) -> web.Response:
        """The model this engine serves, and the model with each of its adapters."""
        info = self._service.info
        return json_response({"object": "list", "data": [_model_card(info, name) for name in _names(info)]})

    async def model(self, request: web.Request) -> web.Response:
        """One model by name."""
        info, name = self._service.info, request.match_info["model"]
        if name not in _names(info):
            raise _no_such_model(name, info)
        return json_response(_model_card(info, name))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        body = parse(await body_of(request), CompletionRequest)
        info, tokenizer = self._service.info, await self._service.tokenizer()
        given = body.prompts()
        prompts = [await _sendable_ids(tokenizer, prompt, info) for prompt in given]
        plan = self._plan(request, body, prompts, info, "cmpl", DEFAULT_COMPLETION_TOKENS)
        echoes = [as_text(tokenizer, prompt) for prompt in given] if body.echo else None
        if body.echo and body.logprobs is not None:
            _ask_for_prompt(plan, body.logprobs)
        return await self._answer(request, body, plan, CompletionShape(tokenizer, body.num_logprobs()), echoes)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        body = parse(await body_of(request), ChatRequest)
        info, tokenizer = self._service.info, await self._service.tokenizer()
        messages = body.plain_messages()
        await _probe(tokenizer, "".join(str(message["content"]) for message in messages), info)
        prompt = await chat_token_ids(tokenizer, messages, body.add_generation_prompt)
        _check_sendable(len(prompt), info)
        room = (info.max_model_len or len(prompt) + 1) - len(prompt)
        plan = self._plan(request, body, [prompt], info, "chatcmpl", max(room, 1))
        return await self._answer(request, body, plan, ChatShape(tokenizer, body.num_logprobs()))

    # ---- from body to plan ------------------------------------------------------------------------------------

    def _plan(
        self,
        request: web.Request,
        body: CommonRequest,
        prompts: list[list[int]],
        info: EngineInfo,
        prefix: str,
        default_max_tokens: int,
    ) -> Plan:
        check_model(body.model, info)
        caller: Caller = request[CALLER]
        caller.check_priority(body.priority)
        if len(prompts) * body.n > MAX_ANSWERS:
            raise ApiError(
                400, f"{len(prompts)} prompts with n={body.n} are {len(prompts) * body.n} answers, the limit is "
                f"{MAX_ANSWERS} per request: send several", code="bad_request", param="n",
            )  # fmt: skip
        if not all(prompts):
            raise ApiError(400, "the prompt is empty: give at least one token", code="bad_request", param="prompt")
        return Plan(
            request_id=_request_id(request, body, prefix),
            prompts=prompts,
            sampling=body.sampling(default_max_tokens),
            n=body.n,
            stops=body.stops,
            include_stop=body.include_stop_str_in_output,
            priority=body.priority,
            cache_salt=body.cache_salt,
            adapter=body.model if body.model in info.adapters else None,
            caller=caller.name,
        )

    async def _answer(
        self, request: web.Request, body: CommonRequest, plan: Plan, shape: Shape, echoes: list[str] | None = None
    ) -> web.StreamResponse:
        """Submit, answer, and leave nothing behind whatever happens."""
        tokenizer = await self._service.tokenizer()
        with self._service.admitted():
            generation = Generation(self._service.link, tokenizer, plan, self._service.answered)
            response = Response(
                generation, Renderer(shape, plan.request_id, plan.adapter or self._service.info.model), echoes
            )
            try:
                await generation.submit()
                if body.stream:
                    return await response.streamed(request, body.stream_options or StreamOptions())
                return await response.whole()
            except CommandRefused as refused:
                self._service.refused(refused.code, refused.message)
                raise
            finally:
                generation.close()


def check_model(name: str | None, info: EngineInfo) -> None:
    """Raise `ApiError` 404 for a model that isn't served; none named is the one there is."""
    if name and name not in _names(info):
        raise _no_such_model(name, info)


def _names(info: EngineInfo) -> list[str]:
    """What a request may give as its model."""
    return [info.model, *info.adapters]


def _model_card(info: EngineInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(info.started_wall),
        "owned_by": "schedtop",
        "root": name,
        "parent": info.model if name in info.adapters else None,
        "max_model_len": info.max_model_len,
    }


def _no_such_model(asked: str, info: EngineInfo) -> ApiError:
    served = ", ".join(map(repr, _names(info)))
    return ApiError(404, f"model {asked!r} isn't served here, {served} is", code="model_not_found", param="model")


def _request_id(request: web.Request, body: CommonRequest, prefix: str) -> str:
    own = body.request_id or request.headers.get("X-Request-Id")
    if own is None:
        return f"{prefix}-{uuid.uuid4().hex}"
    if not (len(own) <= 128 and own.isprintable()):
        raise ApiError(400, "X-Request-Id must have 1 to 128 printable characters", code="bad_request")
    return f"{prefix}-{own}"


async def chat_token_ids(
    tokenizer: Tokenizer, messages: list[dict[str, object]], add_generation_prompt: bool
) -> list[int]:
    """Token ids of a conversation, made off the event loop. Raises `ApiError` 400 for what the template refuses."""
    try:
        return await asyncio.to_thread(
            tokenizer.apply_chat_template, messages, add_generation_prompt=add_generation_prompt
        )
    except ValueError as error:
        raise ApiError(
            400, f"the model's chat template refuses this: {error}", code="bad_request", param="messages"
        ) from None


async def token_ids(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    """Token ids of a prompt; a long text's are made off the event loop."""
    if not isinstance(prompt, str):
        return prompt
    if len(prompt) > LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, prompt)
    return tokenizer.encode(prompt)


async def _sendable_ids(tokenizer: Tokenizer, prompt: str | list[int], info: EngineInfo) -> list[int]:
    """Token ids of a prompt. Raises `ApiError` 400 for one so long that the engine needn't even count it."""
    if isinstance(prompt, str):
        await _probe(tokenizer, prompt, info)
    ids = await token_ids(tokenizer, prompt)
    _check_sendable(len(ids), info)
    return ids


async def _probe(tokenizer: Tokenizer, text: str, info: EngineInfo) -> None:
    """Raise `ApiError` 400 if the beginning of a very long text is too long already."""
    size = PROBED_CHARACTERS * (info.max_model_len or len(text))
    if len(text) > size:
        _check_sendable(len(await token_ids(tokenizer, text[:size])), info, "at least ")


def _check_sendable(num_tokens: int, info: EngineInfo, about: str = "") -> None:
    if info.max_model_len is not None and num_tokens > MAX_OVERLENGTH * info.max_model_len:
        raise ApiError(
            400, f"the prompt has {about}{num_tokens} tokens, the limit is {info.max_model_len - 1} "
            f"(max_model_len {info.max_model_len} less one for the answer); shorten it",
            code="context_length_exceeded", param="prompt",
        )  # fmt: skip


def _ask_for_prompt(plan: Plan, num_logprobs: int) -> None:
    """Have the prompt's log-probabilities told. A salt of its own, for tokens from the prefix cache have none."""
    plan.sampling = msgspec.structs.replace(plan.sampling, prompt_logprobs=num_logprobs)
    plan.cache_salt = uuid.uuid4().hex
    plan.tells_prompt = True


def as_text(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    """The text of a prompt; halves of characters show as U+FFFD."""
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(tokenizer.token_bytes, prompt)).decode(errors="replace")
