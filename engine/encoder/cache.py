"""The encoder cache: embeddings of images and the like, shared by content, kept until their last reader is past them.

An entry is reserved only for a request that is scheduled in the same step, so that requests which merely wait can
never fill the cache. Sizes are in embeddings. Computing the embeddings is the runner's business.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec


class MediaItem(msgspec.Struct, frozen=True):
    """One media input of a prompt: its placeholder tokens stand at `offset` to `offset + num_tokens`."""

    content_hash: str
    offset: int
    num_tokens: int
    """Placeholder tokens, and embeddings: one each."""


@dataclass(slots=True)
class _Entry:
    size: int
    readers: set[str] = field(default_factory=set)


class EncoderCache:
    """`capacity` embeddings in all. free + used = capacity; used counts entries with and without readers."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_used = 0
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Entries without a reader, evicted oldest first."""
        self._evicted: list[str] = []

    @property
    def num_free(self) -> int:
        """Embeddings that nothing occupies."""
        return self.capacity - self.num_used

    @property
    def num_reclaimable(self) -> int:
        """Embeddings that can be had: free, or held by entries nobody reads."""
        return self.num_free + sum(self._entries[content].size for content in self._idle)

    def __contains__(self, content_hash: str) -> bool:
        return content_hash in self._entries

    def reserve(self, item: MediaItem, request_id: str) -> None:
        """Make a request a reader of an item, evicting idle entries for a new one; there must be room."""
        entry = self._entries.get(item.content_hash)
        if entry is None:
            while self.num_free < item.num_tokens:
                self._evict_oldest()
            entry = self._entries[item.content_hash] = _Entry(item.num_tokens)
            self.num_used += item.num_tokens
        entry.readers.add(request_id)
        self._idle.pop(item.content_hash, None)

    def release(self, item: MediaItem, request_id: str) -> None:
        """A request needs an item no more; idempotent. The entry stays until its room is needed."""
        entry = self._entries.get(item.content_hash)
        if entry is None or request_id not in entry.readers:
            return
        entry.readers.remove(request_id)
        if not entry.readers:
            self._idle[item.content_hash] = None

    def any_reader(self, content_hash: str) -> str | None:
        """The id of some request that reads an entry."""
        return next(iter(self._entries[content_hash].readers), None)

    def is_read(self, content_hash: str) -> bool:
        """Whether an item is here and some request reads it."""
        return content_hash in self._entries and content_hash not in self._idle

    def drop(self, content_hash: str) -> set[str]:
        """Forget an entry; returns who reads it. Idempotent."""
        entry = self._entries.pop(content_hash, None)
        if entry is None:
            return set()
        self.num_used -= entry.size
        self._idle.pop(content_hash, None)
        self._evicted.append(content_hash)
        return entry.readers

    def take_evicted(self) -> list[str]:
        """Contents forgotten since the last call: whoever holds the embeddings may free them."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _evict_oldest(self) -> None:
        content = next(iter(self._idle))
        self.drop(content)
