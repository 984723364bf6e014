"""How a KV block travels: a header that says whose it is, then its bytes.

Wrong KV gives fluent, wrong text, so a block is only taken when everything about it fits: model, dtype, shape, key and
checksum. Torch-free; where the bytes are kept is `folder.py`'s and `redis.py`'s business.
"""

from hashlib import blake2b
from math import prod

import msgspec

from schedtop.engine.kv.hashing import HASH_SCHEME

_MAGIC = b"schedtop-kv-1\n"
_CHECKSUM_SIZE = 16
_ITEM_SIZES = {"int64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class BadBlock(ValueError):
    """Bytes that are no block of this format under this key: truncated, damaged, or somebody else's."""


class KVFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What two engines must have in common for one's blocks to mean the same to the other."""

    namespace: str = ""
    """Keeps apart engines that could share and shouldn't."""
    model: str
    """Fingerprint of the weights."""
    dtype: str
    """Of the KV cache: int64, float32, float16 or bfloat16."""
    block_shape: tuple[int, ...]
    """Shape of one block, all layers together."""
    hash_scheme: str = HASH_SCHEME

    @property
    def fingerprint(self) -> str:
        """Short name of this format, part of every key."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=12).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of one block's content."""
        return prod(self.block_shape) * _ITEM_SIZES[self.dtype]

    def pack(self, key: bytes, content: bytes) -> bytes:
        """Header and content of the block that `key` (its content hash) names."""
        assert len(content) == self.num_bytes, f"a block has {self.num_bytes} bytes, not {len(content)}"
        header = msgspec.msgpack.encode(_Header(format=self, key=key, checksum=_checksum(key, content)))
        return _MAGIC + len(header).to_bytes(4, "big") + header + content

    def unpack(self, key: bytes, packed: bytes) -> bytes:
        """The content again. Raises `BadBlock` unless it is whole and exactly what was asked for."""
        if not packed.startswith(_MAGIC):
            raise BadBlock("it doesn't start as a KV block does")
        start = len(_MAGIC) + 4
        end = start + int.from_bytes(packed[len(_MAGIC) : start], "big")
        try:
            header = msgspec.msgpack.decode(packed[start:end], type=_Header)
        except msgspec.MsgspecError as error:
            raise BadBlock(f"its header is damaged: {error}") from None
        content = packed[end:]
        if header.format != self or header.key != key:
            raise BadBlock(f"it is a block of another model, format or prefix: {header.format}")
        if len(content) != self.num_bytes:
            raise BadBlock(f"it has {len(content)} bytes of {self.num_bytes}")
        if header.checksum != _checksum(key, content):
            raise BadBlock("its checksum is wrong")
        return content


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: KVFormat
    key: bytes
    checksum: bytes


def _checksum(key: bytes, content: bytes) -> bytes:
    return blake2b(content, key=key, digest_size=_CHECKSUM_SIZE).digest()
