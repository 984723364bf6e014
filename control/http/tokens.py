"""`/tokenize` and `/detokenize`, as vLLM's server has them: benchmarks size their prompts by these."""

from aiohttp import web

from schedtop.control.http.as_json import json_response
from schedtop.control.http.body import body_of
from schedtop.control.http.failures import ApiError
from schedtop.control.http.openai import as_text, chat_token_ids, check_model, token_ids
from schedtop.control.http.openai_types import DetokenizeRequest, TokenizeRequest, parse, plain_messages
from schedtop.control.http.render import token_text
from schedtop.control.http.service import Service

MAX_CHARACTERS = 1 << 20
"""Longest text to tokenise: with more, others would wait for it."""


class TokenRoutes:
    """Handlers; all they need is in the service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: web.Request) -> web.Response:
        """Token ids of a prompt, or of messages through the model's chat template."""
        body = parse(await body_of(request), TokenizeRequest)
        info, tokenizer = self._service.info, await self._service.tokenizer()
        check_model(body.model, info)
        _check_size(body)
        if body.prompt is not None:
            ids = await token_ids(tokenizer, body.prompt)
        else:
            ids = await chat_token_ids(tokenizer, plain_messages(body.messages or []), body.add_generation_prompt)
        texts = [token_text(tokenizer, token_id) for token_id in ids] if body.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": texts}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """The text of token ids."""
        body = parse(await body_of(request), DetokenizeRequest)
        check_model(body.model, self._service.info)
        return json_response({"prompt": as_text(await self._service.tokenizer(), body.tokens)})


def _check_size(body: TokenizeRequest) -> None:
    texts = [body.prompt or "", *(str(message.get("content", "")) for message in body.messages or ())]
    if (size := sum(map(len, texts))) > MAX_CHARACTERS:
        raise ApiError(
            400, f"the text has {size} characters, the limit is {MAX_CHARACTERS}: send it in parts",
            code="bad_request", param="prompt",
        )  # fmt: skip
