"""One KV block, and the queue of the free ones. Which block is handed out when is decided in `block_pool.py`."""

from collections.abc import Iterable, Iterator


class KVCacheBlock:
    """A fixed-size piece of the KV cache. `prev` and `next` link it into the free queue while nobody uses it."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        """Set while the block can be found by its content."""
        self.prev: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        hashed = "hashed" if self.block_hash is not None else "unhashed"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {hashed})"


class FreeBlockQueue:
    """Free blocks in the order in which they are handed out: doubly linked, so that any block leaves in O(1).

    A deque would make a cache hit on a free block cost a walk through the queue.
    """

    __slots__ = ("_ends", "num_free")

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        ends = KVCacheBlock(-1)  # a ring: ends.next is the front, ends.prev the back
        ends.prev = ends.next = ends
        self._ends = ends
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def popleft(self) -> KVCacheBlock:
        """Take the front block; the caller knows that there is one."""
        ends, block = self._ends, self._ends.next
        assert block is not None and block is not ends, "popleft from an empty free queue"
        follower = block.next
        assert follower is not None
        ends.next, follower.prev = follower, ends
        block.prev = block.next = None
        self.num_free -= 1
        return block

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back."""
        self._insert_before(self._ends, block)

    def prepend_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put a group at the front, the group's first block foremost."""
        front = self._ends.next
        assert front is not None
        for block in blocks:
            self._insert_before(front, block)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands."""
        before, after = block.prev, block.next
        assert before is not None and after is not None, f"{block} isn't in the free queue"
        before.next = after
        after.prev = before
        block.prev = block.next = None
        self.num_free -= 1

    def _insert_before(self, place: KVCacheBlock, block: KVCacheBlock) -> None:
        before = place.prev
        assert before is not None
        block.prev, block.next = before, place
        before.next = place.prev = block
        self.num_free += 1
