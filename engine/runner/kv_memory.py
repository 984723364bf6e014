"""The KV cache block by block, as bytes: what a KV transfer reads and fills. Nothing here knows requests or stores."""

import torch

from schedtop.engine.kv.connector.format import KVFormat


class PagedMemory:
    """Views `kv_caches`, one tensor [2, num_blocks, block_size, num_kv_heads, head_size] per layer, by block."""

    def __init__(self, kv_caches: list[torch.Tensor]) -> None:
        self._caches = kv_caches
        first = kv_caches[0]
        self._dtype = first.dtype
        self._shape = (len(kv_caches), 2, *first.shape[2:])

    def format(self, model: str, namespace: str = "") -> KVFormat:
        """What these blocks are, for a model whose weights have this fingerprint."""
        dtype = str(self._dtype).removeprefix("torch.")
        return KVFormat(model=model, dtype=dtype, block_shape=self._shape, namespace=namespace)

    def read_block(self, block_id: int) -> bytes:
        """A copy of one block of all layers."""
        block = torch.stack([cache[:, block_id] for cache in self._caches])
        return block.cpu().view(torch.uint8).numpy().tobytes()

    def write_block(self, block_id: int, content: bytes) -> None:
        """Fill one block of all layers; it must not be in use."""
        block = torch.frombuffer(bytearray(content), dtype=self._dtype).view(self._shape)
        for cache, part in zip(self._caches, block, strict=True):
            cache[:, block_id].copy_(part)
