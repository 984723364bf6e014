"""From token ids to text that may be shown: no half characters, no part of a stop string. Sans-I/O.

Nothing here may know of HTTP, sockets or the engine: bytes of tokens go in, final text comes out, and what has come
out is never taken back.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

TokenBytes = Callable[[int], bytes]
"""The bytes one token stands for; empty for special tokens that aren't shown."""


class Tokenizer(Protocol):
    """What the gateway needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; the text of a special token, empty for an id outside the vocabulary."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model instead of standing for text."""
        ...

    def apply_chat_template(
        self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation. Raises `ValueError` when the template refuses it or there is none."""
        ...


class IncrementalDecoder:
    """Decodes tokens one by one; a character is shown once all its bytes are there.

    Joined output equals the one-shot decode of all bytes, with U+FFFD for what can't be decoded.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Text that this token completes, possibly none."""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that was cut."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Finds the first stop string to be complete, and holds text back while it may be the start of one.

    Of several that become complete at the same character the longest counts, so nothing of it is shown. The result
    doesn't depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> str:
        """Text that may be shown now. After a match nothing more comes."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = min(
            ((start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0), default=None
        )
        if found is not None:
            end, start = found
            self.matched, self._held = text[start:end], ""
            return text[: end if self._include_stop else start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, once it is clear that no more comes."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string starts with."""
        longest = max(map(len, self._stops), default=0)
        for size in range(min(longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class TextStream:
    """One answer's text: decoder and stop strings in a row.

    Stop strings count in the text after the first `min_tokens` tokens only.
    """

    def __init__(
        self, token_bytes: TokenBytes, stops: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._decoder = IncrementalDecoder(token_bytes)
        self._matcher = StopMatcher(stops, include_stop)
        self._num_unchecked = min_tokens
        self.num_chars = 0
        """Characters decoded so far, shown or held back."""

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.matched

    def feed(self, token_id: int) -> str:
        """Text that may be shown after one more token."""
        text = self._decoder.feed(token_id)
        self.num_chars += len(text)
        if self._num_unchecked > 0:
            self._num_unchecked -= 1
            return text
        return self._matcher.feed(text)

    def finish(self) -> str:
        """The rest of the text when the engine has ended the request."""
        return self._matcher.feed(self._decoder.flush()) + self._matcher.flush()
