"""Bodies of the OpenAI-compatible routes, and what they become. Field names are OpenAI's and vLLM's.

An unknown field is an error, so that a misspelt one is never dropped silently; fields in `_IGNORED` are known and have
no effect here. No HTTP in here.
"""

import difflib
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec

from schedtop.control.http.failures import ApiError, from_bad_json
from schedtop.control.operations import PRIORITY_HIGH, PRIORITY_LOW
from schedtop.engine.errors import RequestRefused
from schedtop.engine.sampling_params import SamplingParams

MAX_N = 128
MAX_STOPS = 32
MAX_STOP_LENGTH = 1000
MAX_REQUEST_ID_LENGTH = 128

_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
    "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens", "return_tokens_as_token_ids",
})  # fmt: skip
"""Accepted and without effect: they name the user, or choose what is the only way here."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream tells besides its text."""

    include_usage: bool = False
    """A last chunk with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """The usage so far with every chunk."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The `json_schema` of a response format."""

    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What shape the answer must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Any body of these routes."""

    def check(self) -> None:
        """Raise `ApiError` 400 naming the first field out of range."""


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """Body of `/tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def check(self) -> None:
        """Raise `ApiError` 400 unless there is one thing to tokenise."""
        if (self.prompt is None) == (not self.messages):
            _refuse("prompt", "prompt: give either a prompt or messages")


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


class CommonRequest(Body, frozen=True, kw_only=True):
    """Fields that completions and chat completions share."""

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def num_logprobs(self) -> int | None:
        """Log-probabilities wanted per token besides the sampled one's; None = none at all."""
        raise NotImplementedError

    def token_limit(self) -> int | None:
        """The most tokens to generate, None = as many as fit."""
        return self.max_tokens

    def check(self) -> None:
        """Raise `ApiError` 400 naming the first field out of range."""
        if not 1 <= self.n <= MAX_N:
            _bad("n", self.n, f"is outside its range 1 to {MAX_N}")
        if not PRIORITY_LOW <= self.priority <= PRIORITY_HIGH:
            _bad("priority", self.priority, f"is outside its range {PRIORITY_LOW} to {PRIORITY_HIGH}; lower runs first")
        if self.stream_options is not None and not self.stream:
            _bad("stream_options", "given", "has a meaning with stream=true only")
        stops = self.stops
        if len(stops) > MAX_STOPS:
            _refuse("stop", f"stop has {len(stops)} strings, the limit is {MAX_STOPS}")
        if (longest := max(map(len, stops), default=0)) > MAX_STOP_LENGTH:
            _refuse("stop", f"stop has a string of {longest} characters, the limit is {MAX_STOP_LENGTH}")
        if "" in stops:
            _bad("stop", "''", f"must be strings of 1 to {MAX_STOP_LENGTH} characters")
        if self.request_id is not None:
            _check_request_id(self.request_id)

    def sampling(self, default_max_tokens: int) -> SamplingParams:
        """The engine's settings. Raises `ApiError` 400 naming the first one out of range."""
        limit = self.token_limit()
        params = SamplingParams(
            max_tokens=default_max_tokens if limit is None else limit,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(_or(self.top_k, 0), 0),  # vLLM's -1 means off too
            min_p=_or(self.min_p, 0.0),
            seed=self.seed,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=_logit_bias(self.logit_bias or {}),
            logprobs=self.num_logprobs(),
            grammar=_grammar(self.response_format),
        )
        try:
            params.check()
        except RequestRefused as refused:
            name = str(refused).partition("=")[0]
            raise ApiError(400, str(refused), code="bad_request", param=name) from None
        return params


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[Any]
    """A text, several, or token ids in place of texts."""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def num_logprobs(self) -> int | None:
        """As the field says."""
        return self.logprobs

    def check(self) -> None:
        """Raise `ApiError` 400 for what can't be done here."""
        CommonRequest.check(self)
        if self.best_of is not None and self.best_of != self.n:
            _bad("best_of", self.best_of, f"isn't supported: ask for n={self.best_of} and choose")
        if self.suffix:
            _bad("suffix", "given", "isn't supported: the model doesn't fill in the middle")

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises `ApiError` 400 for a mixture or an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if (tokens := _as(list[int], self.prompt)) is not None:
            return [tokens]
        if (texts := _as(list[str], self.prompt)) is not None:
            return [*texts]
        if (lists := _as(list[list[int]], self.prompt)) is not None:
            return [*lists]
        raise ApiError(
            400, "prompt is neither a text nor a list of texts nor token ids", code="bad_request", param="prompt"
        )


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    tools: list[Any] | None = None
    tool_choice: Any = None

    def num_logprobs(self) -> int | None:
        """`top_logprobs` counts only if `logprobs` is asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def check(self) -> None:
        """Raise `ApiError` 400 for what can't be done here."""
        CommonRequest.check(self)
        if not self.messages:
            _bad("messages", "[]", "is empty: give at least one message")
        if self.tools or self.tool_choice not in (None, "none"):
            _bad("tools", "given", "isn't supported: the answers are plain text")
        if self.top_logprobs is not None and not self.logprobs:
            _bad("top_logprobs", self.top_logprobs, "has a meaning with logprobs=true only")

    def plain_messages(self) -> list[dict[str, object]]:
        """Messages whose content is text. Raises `ApiError` 400 for images and the like."""
        return plain_messages(self.messages)


AnyRequest = TypeVar("AnyRequest", bound=Body)
T = TypeVar("T")


def parse(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """A checked request. Raises `ApiError` 400 naming the field at fault, its value and what it may be."""
    try:
        fields = msgspec.json.decode(body)
        if not isinstance(fields, dict):
            raise ApiError(400, "the body is no JSON object", code="bad_request")
        request = msgspec.convert(fields, kind)
    except msgspec.DecodeError as error:
        raise from_bad_json(error) from None
    known = set(kind.__struct_fields__)
    for name in fields.keys() - known - _IGNORED:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ApiError(400, f"no field is called {name!r}{hint}", code="unknown_field", param=name)
    request.check()
    return request


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        _refuse("request_id", f"request_id has {len(request_id)} characters, the limit is {MAX_REQUEST_ID_LENGTH}")
    if not request_id or not request_id.isprintable():
        _bad("request_id", repr(request_id), f"must have 1 to {MAX_REQUEST_ID_LENGTH} printable characters")


def _bad(name: str, value: object, why: str) -> NoReturn:
    _refuse(name, f"{name}={value} {why}")


def _refuse(name: str, message: str) -> NoReturn:
    raise ApiError(400, message, code="bad_request", param=name)


def _as(kind: type[T], value: Any) -> T | None:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    checked = {}
    for key, value in bias.items():
        if not key.isdecimal():
            _bad("logit_bias", key, "is no token id")
        if not -100.0 <= value <= 100.0:
            _bad("logit_bias", value, "is outside its range -100 to 100")
        checked[int(key)] = value
    return checked


def _grammar(response_format: ResponseFormat | None) -> str | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return '{"type": "object"}'
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        _bad("response_format", "json_schema", "needs json_schema.schema")
    return msgspec.json.encode(response_format.json_schema.schema).decode()


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Messages whose content is text. Raises `ApiError` 400 for images and the like."""
    return [{**message, "role": _role(message), "content": _text_of(message)} for message in messages]


def _role(message: dict[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        _refuse("messages", f"messages: {_shown(role)} is no role: each message needs one, such as user")
    return role


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        _refuse("messages", f"messages: the content {_shown(content)} is neither a text nor a list of text parts")
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) != len(parts):
        _refuse("messages", "messages: a part of the content isn't of type text: the model reads only text")
    return "\n".join(texts)


def _shown(value: object) -> str:
    """A value as JSON, as far as it fits a message."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else f"{text[:39]}…"
