"""KV blocks in a Redis server that engines share. What the server keeps how long is its `maxmemory-policy`'s business.

A server that is slow or gone is a store without blocks: every call is bounded by a timeout, and after a failure the
server is left alone for a while, so that requests don't queue up behind timeouts.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from schedtop.engine.errors import ConfigError
from schedtop.engine.kv.connector.format import BadBlock, KVFormat

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT_S = 2.0
PAUSE_S = 5.0
"""How long a server that failed is left alone."""


class RedisStore:
    """Implements `BlockStore`. Raises `ConfigError` for a URL that makes no sense, or when redis-py is missing.

    The server needn't be there yet.
    """

    def __init__(self, url: str, kv_format: KVFormat, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._format = kv_format
        self._prefix = f"schedtop:kv:{kv_format.fingerprint}:"
        self._clock = clock
        self._retry_at = 0.0
        self._client = _client(url)

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys, in a row, the server has: one round trip."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(self._name(key))
            found: list[int] = self._try(pipeline.execute, [])
        return next((count for count, exists in enumerate(found) if not exists), len(found))

    def get(self, key: bytes) -> bytes | None:
        """A block's content. A value that isn't that block is deleted, so that a good one can take its place."""
        name = self._name(key)
        packed = self._try(lambda: self._client.get(name), None)
        if packed is None:
            return None
        assert isinstance(packed, bytes)
        try:
            return self._format.unpack(key, packed)
        except BadBlock as error:
            log.warning("KV block %s is ignored and deleted: %s", name, error)
            self._try(lambda: self._client.delete(name), None)
            return None

    def put(self, key: bytes, content: bytes) -> None:
        """Send a block unless the server has it."""
        self._try(lambda: self._client.set(self._name(key), self._format.pack(key, content), nx=True), None)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        import redis

        if self._clock() < self._retry_at:
            return otherwise
        try:
            return call()
        except redis.RedisError as error:
            self._retry_at = self._clock() + PAUSE_S
            log.warning("KV store: Redis failed, left alone for %g s: %s", PAUSE_S, error)
            return otherwise


def _client(url: str) -> "redis.Redis":
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise ConfigError("a Redis KV store needs redis-py: install schedtop[redis]") from None
    try:
        return redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise ConfigError(
            f"KV store {url!r} is no Redis URL: {error}; give redis://host:port/db or unix:///path"
        ) from None
