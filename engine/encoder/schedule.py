"""The encoder's part in a step: which media a share of tokens needs, and how far it may go without them.

A share that reaches into an item's placeholder tokens needs the item encoded: within the step's encoder budget and
the cache's room. Where that isn't to be had the share ends just before the item.
"""

from collections.abc import Sequence
from typing import Protocol

from schedtop.engine.config import EngineConfig
from schedtop.engine.encoder.cache import EncoderCache, MediaItem
from schedtop.engine.request import Request


class EncoderScheduler(Protocol):
    """What the two passes ask of the encoder."""

    def begin_step(self) -> None:
        """A new step: the encoder budget is whole again."""

    def limit(self, request: Request, start: int, num_tokens: int) -> int:
        """Tokens from `start` that can be computed in this step, at most `num_tokens`. Reserves nothing."""

    def commit(self, request: Request, start: int, num_tokens: int) -> list[MediaItem]:
        """The share is planned: reserve its items; returns those the runner must encode in this step."""

    def withdraw(self, request: Request, items: list[MediaItem]) -> list[tuple[str, MediaItem]]:
        """The share was taken back in the same step: its budget returns, its reservations end.

        Returns (reader, item) for items that must be encoded all the same, for another request of this step.
        """

    def forget(self, items: Sequence[MediaItem]) -> set[str]:
        """These were to be encoded in a step that broke: returns the requests that counted on them."""

    def release_consumed(self, request: Request) -> None:
        """Let go of items that the request's computed tokens have passed."""

    def release_all(self, request: Request) -> None:
        """Let go of everything: the request was preempted or has ended."""

    def take_evicted(self) -> list[str]:
        """Content hashes of embeddings to be freed before this step's are computed."""


class NoEncoder:
    """For text-only engines."""

    def begin_step(self) -> None:
        """Nothing to reset."""

    def limit(self, request: Request, start: int, num_tokens: int) -> int:
        """No limit."""
        return num_tokens

    def commit(self, request: Request, start: int, num_tokens: int) -> list[MediaItem]:
        """Nothing to encode."""
        return []

    def withdraw(self, request: Request, items: list[MediaItem]) -> list[tuple[str, MediaItem]]:
        """Nothing to take back."""
        return []

    def forget(self, items: Sequence[MediaItem]) -> set[str]:
        """Nothing is encoded."""
        return set()

    def release_consumed(self, request: Request) -> None:
        """Nothing held."""

    def release_all(self, request: Request) -> None:
        """Nothing held."""

    def take_evicted(self) -> list[str]:
        """Nothing was held."""
        return []


class BudgetedEncoder:
    """Encodes at most `max_num_encoder_tokens` embeddings per step into a cache of `cache_size`."""

    def __init__(self, cache_size: int, max_num_encoder_tokens: int) -> None:
        self.cache = EncoderCache(cache_size)
        self._max_per_step = max_num_encoder_tokens
        self._budget = max_num_encoder_tokens

    def begin_step(self) -> None:
        """A new step: the encoder budget is whole again."""
        self._budget = self._max_per_step

    def limit(self, request: Request, start: int, num_tokens: int) -> int:
        """Tokens from `start` that can be computed in this step, at most `num_tokens`."""
        budget, room = self._budget, self.cache.num_reclaimable
        seen = set()
        for item in _reached(request, start, num_tokens):
            if item.content_hash in seen:
                continue
            seen.add(item.content_hash)
            if item.content_hash not in self.cache:
                budget -= item.num_tokens
            if not self.cache.is_read(item.content_hash):  # new, or idle and about to be read: no longer reclaimable
                room -= item.num_tokens
            if budget < 0 or room < 0:
                return max(0, item.offset - start)
        return num_tokens

    def commit(self, request: Request, start: int, num_tokens: int) -> list[MediaItem]:
        """Reserve the share's items; returns those to be encoded now."""
        fresh = []
        reached = _reached(request, start, num_tokens)
        # those that are there first: making room for a new one must not evict them
        for item in sorted(reached, key=lambda item: item.content_hash not in self.cache):
            if item.content_hash not in self.cache:
                self._budget -= item.num_tokens
                fresh.append(item)
            self.cache.reserve(item, request.request_id)
        return fresh

    def withdraw(self, request: Request, items: list[MediaItem]) -> list[tuple[str, MediaItem]]:
        """Give the budget back and let go of what the request reserved."""
        self.release_all(request)
        still_wanted = []
        for item in items:
            reader = self.cache.any_reader(item.content_hash)
            if reader is not None:
                still_wanted.append((reader, item))
            else:
                self.cache.drop(item.content_hash)
                self._budget += item.num_tokens
        return still_wanted

    def forget(self, items: Sequence[MediaItem]) -> set[str]:
        """Drop entries that a broken step was to fill; returns the requests that counted on them."""
        return {reader for item in items for reader in self.cache.drop(item.content_hash)}

    def release_consumed(self, request: Request) -> None:
        """Let go of items that the request's computed tokens have passed."""
        for item in request.media:
            if item.offset + item.num_tokens <= request.num_computed_tokens:
                self.cache.release(item, request.request_id)

    def release_all(self, request: Request) -> None:
        """Let go of everything."""
        for item in request.media:
            self.cache.release(item, request.request_id)

    def take_evicted(self) -> list[str]:
        """Content hashes of embeddings to be freed before this step's are computed."""
        return self.cache.take_evicted()


def encoder_for(config: EngineConfig) -> EncoderScheduler:
    """The encoder an engine of these sizes has."""
    if not config.encoder_cache_size:
        return NoEncoder()
    return BudgetedEncoder(config.encoder_cache_size, config.max_num_encoder_tokens)


def _reached(request: Request, start: int, num_tokens: int) -> list[MediaItem]:
    """Items whose placeholder tokens overlap `start` to `start + num_tokens`."""
    end = start + num_tokens
    return [item for item in request.media if item.offset < end and item.offset + item.num_tokens > start]
