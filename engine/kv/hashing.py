"""Content hashes of KV blocks: a chain, so that equal hashes mean equal prefixes.

hash(block) = H(hash of the block before, its tokens, its extra keys). H is BLAKE2b: a collision that a client could
find would hand one user's context to another. Nothing here knows blocks or requests.
"""

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from struct import Struct

import msgspec

from schedtop.engine.encoder.cache import MediaItem

HASH_SCHEME = "schedtop.kv.v1"
"""Changes whenever the same tokens give another hash: blocks outlive engines in KV stores."""

_PERSON = HASH_SCHEME.encode()  # domain separation: no other use of BLAKE2b can give the same digests
_DIGEST_SIZE = 32
_EMPTY = blake2b(digest_size=_DIGEST_SIZE, person=_PERSON)


@cache
def _packer(num_tokens: int) -> Callable[..., bytes]:
    """Packs as many token ids, 8 bytes each: several times faster than building an array."""
    return Struct(f"<{num_tokens}q").pack


def root_hash(adapter: str | None, cache_salt: str | None) -> bytes:
    """Parent of a first block. The two names are encoded apart: adapter `x` is never salt `x`."""
    return blake2b(msgspec.msgpack.encode((adapter, cache_salt)), digest_size=_DIGEST_SIZE, person=_PERSON).digest()


def media_keys(media: Sequence[MediaItem], start: int, end: int) -> list[str]:
    """Extra keys of the block of tokens `start` to `end`: which media stand in it, and which part of each."""
    keys = []
    for item in media:
        if item.offset < end and item.offset + item.num_tokens > start:
            keys += [item.content_hash, str(item.offset - start)]
    return keys


def block_hash(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[str] = ()) -> bytes:
    """Hash of a full block: `token_ids` has exactly block-size entries; `extra_keys` name media inside the block."""
    state = _EMPTY.copy()
    state.update(parent)
    state.update(_packer(len(token_ids))(*token_ids))
    if extra_keys:
        state.update(msgspec.msgpack.encode(extra_keys))
    return state.digest()
