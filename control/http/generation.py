"""One HTTP request's answers: submits its sequences, turns their tokens into deltas, aborts what is left when closed.

Shapes of responses are not here (`render.py`), nor HTTP.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from schedtop.control.errors import CommandRefused
from schedtop.control.http.failures import ApiError
from schedtop.control.http.link import EngineLink, TokenStream
from schedtop.control.http.text import IncrementalDecoder, TextStream, Tokenizer
from schedtop.control.messages import AddRequest, TokenOutput
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import FinishReason

FINISH_NAMES = {FinishReason.CAPACITY: "length"}
"""Ends that OpenAI's clients know under another name; the detail goes into `stop_reason`."""


@dataclass(slots=True)
class Token:
    """One output token and the alternatives the engine told: (token id, log-probability), the sampled one first."""

    token_id: int
    offset: int
    """Characters of text before it."""
    logprobs: list[tuple[int, float]] | None = None


@dataclass(slots=True)
class Delta:
    """What is new of one choice. `tokens` are those behind the text, kept even where they show no text yet."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Plan:
    """What is to be generated: `n` answers to each prompt, all with the same settings."""

    request_id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    n: int = 1
    stops: list[str] = field(default_factory=list)
    include_stop: bool = False
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    caller: str = ""
    """The token's name: requests can be chosen by it."""
    tells_prompt: bool = False
    """Tell the prompt's tokens, with their log-probabilities, before the answer's."""


class Answer:
    """One sequence: its request in the engine, its text so far, how it ended."""

    def __init__(self, index: int, request_id: str, prompt: list[int], plan: Plan, tokenizer: Tokenizer) -> None:
        self.index = index
        self.request_id = request_id
        self.prompt = prompt
        self.seed_offset = index % plan.n
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.submitted_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.is_in_engine = False
        self._include_stop = plan.include_stop
        self._has_grammar = plan.sampling.grammar is not None
        self._tells_prompt = plan.tells_prompt
        self._num_prompt_chars = 0
        self._token_bytes = tokenizer.token_bytes

        def shown_bytes(token_id: int) -> bytes:
            return b"" if tokenizer.is_special(token_id) else tokenizer.token_bytes(token_id)

        self._text = TextStream(shown_bytes, plan.stops, plan.include_stop, plan.sampling.min_tokens)

    def feed(self, output: TokenOutput) -> Delta:
        """Take new tokens. Raises `ApiError` when the engine ended the request with an error."""
        delta = Delta(self.index)
        if output.token_ids:
            self.last_token_at = time.monotonic()
            self.first_token_at = self.first_token_at or self.last_token_at
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if self._tells_prompt and output.prompt_logprobs is not None:
            delta.tokens += self._prompt_tokens(output.prompt_logprobs)
        for position, token_id in enumerate(output.token_ids):
            logprobs = output.logprobs[position] if output.logprobs else None
            delta.tokens.append(Token(token_id, self._num_prompt_chars + self._text.num_chars, logprobs))
            self.num_tokens += 1
            is_stop_token = output.finish_reason is FinishReason.STOP and position == len(output.token_ids) - 1
            if not is_stop_token or self._include_stop:
                delta.text += self._text.feed(token_id)
            if self._text.stop_found is not None:
                break
        if self._text.stop_found is None and output.finish_reason is not None:
            self._end(delta, output)
        if self._text.stop_found is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._text.stop_found
        self.is_in_engine = self.is_in_engine and output.finish_reason is None
        self.finish_reason = delta.finish_reason
        return delta

    def _prompt_tokens(self, logprobs: list[list[tuple[int, float]] | None]) -> list[Token]:
        """The prompt's tokens; told once, though a preempted request computes them again."""
        self._tells_prompt = False
        tokens = []
        decoder = IncrementalDecoder(self._token_bytes)
        for token_id, alternatives in zip(self.prompt, logprobs, strict=True):
            tokens.append(Token(token_id, self._num_prompt_chars, alternatives))
            self._num_prompt_chars += len(decoder.feed(token_id))
        self._num_prompt_chars += len(decoder.flush())
        return tokens

    def _end(self, delta: Delta, output: TokenOutput) -> None:
        """The engine ended the request: show the rest."""
        assert output.finish_reason is not None
        if output.finish_reason is FinishReason.ERROR:
            self.is_in_engine = False
            raise self._failure(output.detail)
        delta.text += self._text.finish()
        delta.finish_reason = FINISH_NAMES.get(output.finish_reason, output.finish_reason.value)
        delta.stop_reason = output.detail or None

    def _failure(self, detail: str) -> ApiError:
        """A grammar that couldn't be built is the client's, everything else ours."""
        if self._has_grammar and not self.num_tokens and detail.startswith("grammar"):
            return ApiError(400, detail, code="grammar_failed", param="response_format")
        return ApiError(500, detail or "the engine failed at this request", code="engine_error")


OnAnswered = Callable[[Answer, Plan, Sequence[Answer]], None]
"""Told of an answer that has ended, with all answers to the same prompt."""


class Generation:
    """All answers of one HTTP request. Use as: `submit()`, then iterate `deltas()`, and `close()` whatever happens."""

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        plan: Plan,
        on_answered: OnAnswered = lambda answer, plan, siblings: None,
    ) -> None:
        self.plan = plan
        self.answers = self._answers(tokenizer)
        self._link = link
        self._on_answered = on_answered
        self._stream = TokenStream(on_cut=self.close)
        self._by_id = {answer.request_id: answer for answer in self.answers}
        self._is_open = False

    def _answers(self, tokenizer: Tokenizer) -> list[Answer]:
        plan = self.plan
        count = len(plan.prompts) * plan.n
        return [
            Answer(
                index,
                plan.request_id if count == 1 else f"{plan.request_id}-{index}",
                plan.prompts[index // plan.n],
                plan,
                tokenizer,
            )
            for index in range(count)
        ]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once whatever `n`."""
        return sum(map(len, self.plan.prompts))

    async def submit(self) -> None:
        """Hand all sequences to the engine, all or none.

        Raises `CommandRefused` for the first one refused, `Disconnected`, or `ApiError` 409 for an id in use.
        """
        ids = list(self._by_id)
        for request_id in ids:
            if self._link.is_live(request_id):
                raise ApiError(
                    409, f"request id {request_id!r} is in use by a live request; choose another", code="id_in_use"
                )
        self._is_open = True
        self._link.open_stream(ids, self._stream)
        replies = await asyncio.gather(*map(self._add, self.answers), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply

    async def _add(self, answer: Answer) -> None:
        sampling = self.plan.sampling
        if sampling.seed is not None and answer.seed_offset:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + answer.seed_offset)
        answer.is_in_engine = True
        try:
            await self._link.request(
                AddRequest(
                    request_id=answer.request_id,
                    prompt_token_ids=answer.prompt,
                    sampling=sampling,
                    priority=self.plan.priority,
                    cache_salt=self.plan.cache_salt,
                    adapter=self.plan.adapter,
                    parent=self.plan.request_id if len(self.answers) > 1 else "",
                ),
                on_behalf_of=self.plan.caller,
            )
        except CommandRefused:
            answer.is_in_engine = False
            raise

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, as it comes, until all answers have ended. Raises `ApiError`, `Disconnected`, `SlowReader`."""
        num_open = len(self.answers)
        while num_open:
            deltas = []
            for output in await self._stream.take():
                answer = self._by_id[output.request_id]
                if answer.finish_reason is not None:
                    continue
                delta = answer.feed(output)
                if delta.finish_reason is not None:
                    num_open -= 1
                    self._ended(answer)
                deltas.append(delta)
            if deltas:
                yield deltas

    def _ended(self, answer: Answer) -> None:
        self._link.close_stream([answer.request_id])
        # after a stop string the engine doesn't know yet
        self._abort([answer], "stop string found", as_stop=True)
        first = answer.index - answer.seed_offset
        self._on_answered(answer, self.plan, self.answers[first : first + self.plan.n])

    def close(self) -> None:
        """Forget the request and abort what still runs; idempotent, never waits."""
        if not self._is_open:
            return  # refused for an id in use: the stream of that id is somebody else's
        self._is_open = False
        self._link.close_stream(self._by_id)
        self._abort(self.answers, "the client went away")

    def _abort(self, answers: list[Answer], reason: str, as_stop: bool = False) -> None:
        """End those of the answers that the engine may still be working on."""
        live = [answer for answer in answers if answer.is_in_engine and answer.request_id not in self._stream.ended]
        for answer in live:
            answer.is_in_engine = False
        self._link.abort_soon([answer.request_id for answer in live], reason, as_stop)
