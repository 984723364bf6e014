"""The pool of KV blocks: reference counts, the free queue, and cached blocks found by hash.

Nothing here knows requests or tokens. Every change of a reference count goes through `take`, `touch` and `release`.
"""

from collections.abc import Iterable, Reversible

from schedtop.engine.kv.block import FreeBlockQueue, KVCacheBlock

_FREE, _CACHED, _IN_USE, _SHARED = b".cus"


class BlockPool:
    """`num_blocks` blocks, of which block 0 is never handed out when `null_block` is set."""

    def __init__(self, num_blocks: int, null_block: bool) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._usable = self.blocks[1:] if null_block else self.blocks
        self._free_queue = FreeBlockQueue(self._usable)
        # A hash can stand on several blocks: requests that computed the same prefix side by side.
        self._cached: dict[bytes, list[KVCacheBlock]] = {}
        self._letters = bytearray(b"." * num_blocks)
        """What `states` tells, kept up to date: to work it out would take longer than a step when the pool is large."""
        self.num_cached_free = 0
        """Free blocks that still hold a hashed prefix."""
        self.num_shared = 0
        """Blocks used by more than one request."""
        self.num_evictions = 0
        """Cached blocks that were handed out for something else, so far."""

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return len(self._usable)

    @property
    def num_free(self) -> int:
        """Blocks nobody uses, cached ones included."""
        return self._free_queue.num_free

    @property
    def first_usable_id(self) -> int:
        """Id of the first block that is ever handed out; the usable ids are consecutive."""
        return self._usable[0].block_id

    def states(self) -> str:
        """One letter per usable block: `s` shared, `u` in use, `c` cached, `.` free."""
        return self._letters[self.first_usable_id :].decode("ascii")

    def take(self, count: int) -> list[KVCacheBlock]:
        """Hand out `count` blocks from the front of the free queue, forgetting what they cached.

        The caller has checked that there are so many.
        """
        taken = []
        for _ in range(count):
            block = self._free_queue.popleft()
            if block.block_hash is not None:
                self.num_cached_free -= 1
                self.num_evictions += 1
                self.uncache(block)
            block.ref_cnt = 1
            self._letters[block.block_id] = _IN_USE
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a user to cached blocks, taking them out of the free queue where nobody used them."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free_queue.remove(block)
                self.num_cached_free -= 1
                self._letters[block.block_id] = _IN_USE
            elif block.ref_cnt == 1:
                self.num_shared += 1
                self._letters[block.block_id] = _SHARED
            block.ref_cnt += 1

    def release(self, blocks: Reversible[KVCacheBlock]) -> None:
        """Take a user away from a request's blocks, its last block first, so that its tail is reused first.

        Blocks without a hash are worth nothing: as a group to the front of the queue. Hashed ones go to the back.
        """
        worthless = []
        for block in reversed(blocks):
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"{block} released more often than taken"
            if block.ref_cnt == 1:
                self.num_shared -= 1
                self._letters[block.block_id] = _IN_USE
            elif block.ref_cnt == 0:
                self._letters[block.block_id] = _FREE if block.block_hash is None else _CACHED
                if block.block_hash is None:
                    worthless.append(block)
                else:
                    self._free_queue.append(block)
                    self.num_cached_free += 1
        if worthless:
            self._free_queue.prepend_all(worthless)

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        """A block with this content, the one cached first when there are several."""
        blocks = self._cached.get(block_hash)
        return blocks[0] if blocks else None

    def cache(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Let a full block in use be found by its content."""
        assert block.block_hash is None and block.ref_cnt > 0
        block.block_hash = block_hash
        self._cached.setdefault(block_hash, []).append(block)

    def uncache(self, block: KVCacheBlock) -> None:
        """Forget a block's content; the block itself stays where it is."""
        assert block.block_hash is not None
        twins = self._cached[block.block_hash]
        twins.remove(block)
        if not twins:
            del self._cached[block.block_hash]
        block.block_hash = None
        if block.ref_cnt == 0:
            self._letters[block.block_id] = _FREE

    def forget(self, block: KVCacheBlock) -> None:
        """Forget what a block caches, if anything, whether it is in use or free."""
        if block.block_hash is not None:
            self.num_cached_free -= block.ref_cnt == 0
            self.uncache(block)

    def forget_free(self) -> None:
        """Forget the content of every free block."""
        for block in self._free_queue:
            if block.block_hash is not None:
                self.uncache(block)
        self.num_cached_free = 0

    def faults(self, users: dict[int, int]) -> list[str]:
        """Compare the books with the truth; `users` maps a block id to how many hold it. Empty = no fault."""
        free_ids = [block.block_id for block in self._free_queue]
        faults = []
        if len(set(free_ids)) != len(free_ids):
            faults.append("a block stands twice in the free queue")
        if len(free_ids) != self.num_free:
            faults.append(f"free queue holds {len(free_ids)} blocks, its count says {self.num_free}")
        free = set(free_ids)
        for block, letter in zip(self._usable, self.states(), strict=True):
            held_by = users.get(block.block_id, 0)
            if block.ref_cnt != held_by:
                faults.append(f"block {block.block_id} has reference count {block.ref_cnt} but {held_by} users")
            elif letter != _letter(block):
                faults.append(f"block {block.block_id} is told as {letter!r}, it is {_letter(block)!r}")
            if (block.ref_cnt == 0) != (block.block_id in free):
                faults.append(f"block {block.block_id} with reference count {block.ref_cnt} is misplaced")
        cached = {block.block_id for twins in self._cached.values() for block in twins}
        hashed = {block.block_id for block in self._usable if block.block_hash is not None}
        if cached != hashed:
            faults.append(f"cache index and block hashes differ on blocks {sorted(cached ^ hashed)[:8]}")
        if self.num_cached_free != len(hashed & free):
            faults.append(f"{len(hashed & free)} cached free blocks, their count says {self.num_cached_free}")
        if self.num_shared != (shared := sum(block.ref_cnt > 1 for block in self._usable)):
            faults.append(f"{shared} shared blocks, their count says {self.num_shared}")
        return faults


def _letter(block: KVCacheBlock) -> str:
    if block.ref_cnt:
        return "s" if block.ref_cnt > 1 else "u"
    return "." if block.block_hash is None else "c"
