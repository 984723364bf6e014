"""Shapes of OpenAI's responses, streamed and whole. Pure: answers and deltas in, JSON-ready dicts out."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from schedtop.control.http.generation import Answer, Delta, Generation, Token
from schedtop.control.http.text import Tokenizer

Json = dict[str, Any]


class Shape(Protocol):
    """What differs between completions and chat completions."""

    object_whole: str
    object_chunk: str

    def opening(self, index: int) -> Json | None:
        """A choice for before the first text, if the shape has one."""
        ...

    def chunk(self, delta: Delta) -> Json:
        """A streamed choice."""
        ...

    def whole(self, delta: Delta) -> Json:
        """A finished choice."""
        ...


class Renderer:
    """Puts choices of one request into envelopes with id, model and time."""

    def __init__(self, shape: Shape, request_id: str, model: str) -> None:
        self._shape = shape
        self._head = {"id": request_id, "created": int(time.time()), "model": model}

    def openings(self, count: int) -> list[Json]:
        """Chunks that come before any text."""
        choices = (self._shape.opening(index) for index in range(count))
        return [self._chunk([choice]) for choice in choices if choice is not None]

    def chunk(self, delta: Delta, usage: Json | None = None) -> Json:
        """One streamed chunk."""
        return self._chunk([self._shape.chunk(delta)], usage)

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk, which has the usage and no choice."""
        return self._chunk([], usage)

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        """The whole response."""
        choices = [self._shape.whole(delta) for delta in deltas]
        return {**self._head, "object": self._shape.object_whole, "choices": choices, "usage": usage}

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        chunk = {**self._head, "object": self._shape.object_chunk, "choices": choices}
        return chunk if usage is None else {**chunk, "usage": usage}


class CompletionShape:
    """`/v1/completions`."""

    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, tokenizer: Tokenizer, num_logprobs: int | None) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs

    def opening(self, index: int) -> Json | None:
        """Nothing comes before the text."""
        return None

    def chunk(self, delta: Delta) -> Json:
        """A streamed choice looks like a whole one."""
        return self.whole(delta)

    def whole(self, delta: Delta) -> Json:
        """A choice."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._num_logprobs is None:
            return None
        sampled = [_sampled_logprob(token) if token.logprobs else None for token in tokens]
        return {
            "tokens": [token_text(self._tokenizer, token.token_id) for token in tokens],
            "token_logprobs": sampled,
            "top_logprobs": [self._top(token) if token.logprobs else None for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float]:
        """Alternatives by text; where two share one text (halves of characters), the likelier one."""
        alternatives = _alternatives(token, self._num_logprobs or 0) or [(token.token_id, _sampled_logprob(token))]
        return {token_text(self._tokenizer, token_id): value for token_id, value in reversed(alternatives)}


class ChatShape:
    """`/v1/chat/completions`."""

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, num_logprobs: int | None) -> None:
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs

    def opening(self, index: int) -> Json | None:
        """Who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: Delta) -> Json:
        """A streamed choice."""
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return {
            "index": delta.index,
            "delta": content,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def whole(self, delta: Delta) -> Json:
        """A choice."""
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._num_logprobs is None:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Token) -> Json:
        alternatives = _alternatives(token, self._num_logprobs or 0)
        return {
            **self._one(token.token_id, _sampled_logprob(token)),
            "top_logprobs": [self._one(token_id, value) for token_id, value in alternatives],
        }

    def _one(self, token_id: int, logprob: float) -> Json:
        token = self._tokenizer.token_bytes(token_id)
        return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token)}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """One token by itself as text; half a character shows as U+FFFD."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def usage_of(generation: Generation) -> Json:
    """Token counts of a request so far, prompts counted once each."""
    num_prompt = generation.num_prompt_tokens
    num_output = sum(answer.num_tokens for answer in generation.answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": _num_cached(generation.answers, generation.plan.n)},
    }


def _num_cached(answers: Sequence[Answer], n: int) -> int:
    """Cached prompt tokens, of the first answer to each prompt."""
    return sum(answer.num_cached_tokens for answer in answers[::n])


def _sampled_logprob(token: Token) -> float:
    """Of the token that was chosen."""
    return next((value for token_id, value in token.logprobs or () if token_id == token.token_id), _IMPOSSIBLE)


def _alternatives(token: Token, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens, likeliest first; each once."""
    unique = dict(token.logprobs or ())
    return sorted(unique.items(), key=lambda pair: -pair[1])[:count]


_IMPOSSIBLE = -9999.0
"""Log-probability shown when the engine told none (JSON has no infinity)."""
