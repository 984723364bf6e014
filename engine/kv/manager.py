"""KVCacheManager: which blocks hold which request's context. The one place where requests and blocks meet.

Block counts needed, prefix lookup, allocation, hashing of full blocks, freeing. When to do it is the scheduler's.
"""

from collections import Counter, deque
from collections.abc import Sequence

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import Knobs
from schedtop.engine.kv.block import KVCacheBlock
from schedtop.engine.kv.block_pool import BlockPool
from schedtop.engine.kv.hashing import block_hash, media_keys, root_hash
from schedtop.engine.request import NEVER, Request
from schedtop.engine.snapshot import PoolUsage


class KVCacheManager:
    """Allocates KV blocks to requests out of one `BlockPool`."""

    def __init__(self, config: EngineConfig, knobs: Knobs) -> None:
        self.pool = BlockPool(config.num_kv_blocks, config.null_block)
        self.block_size = config.block_size
        self._config = config
        self.watermark_blocks = 0
        """Free blocks kept back when a waiting request is admitted beside running ones."""
        self.num_reserved = 0
        """Usable blocks that `kv_block_limit` keeps out of use."""
        self.prefix_caching = knobs.prefix_caching
        self._held: dict[str, list[KVCacheBlock]] = {}
        """Blocks kept for a transfer, by direction and request id: the request itself may be gone."""
        self._pending: list[tuple[int, list[KVCacheBlock]]] = []
        """Blocks freed while a step that may write them is in flight: (that step, blocks)."""
        self.step = 0
        """The step being planned, or planned last."""
        self._settled_step = 0
        """The newest step that is done."""
        self._last_write: dict[str, int] = {}
        """Of ended requests whose blocks are being sent: the last step that may write there."""
        self._unsettled: deque[tuple[int, KVCacheBlock]] = deque()
        """Blocks that can be found by content already, though the step that fills them isn't done: (step, block)."""
        self._doomed_loads: set[str] = set()
        """Loads whose blocks, or those before them, turned out worthless meanwhile."""
        self.apply(knobs)

    def apply(self, knobs: Knobs) -> None:
        """Take over the knobs that shape the pool."""
        config = self._config
        base = config.num_kv_blocks if config.watermark_counts_null_block else config.num_usable_blocks
        self.watermark_blocks = int(knobs.watermark * base)
        limit = knobs.kv_block_limit or config.num_usable_blocks
        self.num_reserved = config.num_usable_blocks - limit
        self.prefix_caching = knobs.prefix_caching

    @property
    def num_free(self) -> int:
        """Blocks that may be handed out now; below 0 while a lowered `kv_block_limit` drains."""
        return self.pool.num_free - self.num_reserved

    @property
    def capacity(self) -> int:
        """Blocks a single request could ever have under the present limit."""
        return self.pool.num_usable - self.num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of context."""
        return -(-num_tokens // self.block_size)

    # ---- lookup ---------------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> list[KVCacheBlock]:
        """The longest cached prefix, in whole blocks; at least one token is left to compute, for it is sampled from."""
        if not self.prefix_caching:
            return []
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        self._extend_hashes(request, num_blocks)
        hits = []
        for content in request.block_hashes[:num_blocks]:
            block = self.pool.find(content)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_blocks_missing(self, request: Request, num_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> int:
        """Free blocks it takes to give `request` room for `num_tokens`; hits that nobody uses count as well."""
        missing = -(-num_tokens // self.block_size) - len(request.blocks) - len(hits)
        return max(missing, 0) + sum(block.ref_cnt == 0 for block in hits)

    # ---- allocation -----------------------------------------------------------------------------------------

    def grow(self, request: Request, num_tokens: int) -> list[KVCacheBlock] | None:
        """Give a request room for `num_tokens` in all; the new blocks, or None if there aren't enough."""
        missing = -(-num_tokens // self.block_size) - len(request.blocks)
        if missing <= 0:
            return []
        if missing > self.pool.num_free - self.num_reserved:
            return None
        blocks = self.pool.take(missing)
        request.blocks += blocks
        request.num_slots = len(request.blocks) * self.block_size
        return blocks

    def adopt(self, request: Request, hits: Sequence[KVCacheBlock]) -> None:
        """Start a request's table with cached blocks found by `find_prefix` in this same step."""
        assert not request.blocks
        self.pool.touch(hits)
        request.blocks = list(hits)
        request.num_slots = len(hits) * self.block_size
        request.num_hashed_blocks = len(hits)
        request.hash_at = request.num_slots + self.block_size if self.prefix_caching else NEVER

    def hash_full_blocks(self, request: Request, num_settled: int) -> None:
        """Let the blocks that `num_settled` known, computed or planned tokens fill be found by later requests."""
        if request.hash_at == NEVER:
            return
        num_full = min(num_settled, len(request.token_ids)) // self.block_size
        if num_full <= request.num_hashed_blocks:
            return
        self._extend_hashes(request, num_full)
        for index in range(request.num_hashed_blocks, num_full):
            block = request.blocks[index]
            if block.block_hash is None:
                self.pool.cache(block, request.block_hashes[index])
                self._unsettled.append((self.step, block))
        request.num_hashed_blocks = num_full
        request.hash_at = (num_full + 1) * self.block_size

    def is_built_upon(self, request: Request, num_computed: int) -> bool:
        """Whether another request uses blocks of this one that lie beyond `num_computed` tokens."""
        return any(block.ref_cnt > 1 for block in request.blocks[num_computed // self.block_size :])

    def unhash_from(self, request: Request, num_computed: int) -> None:
        """Forget the hashes of blocks beyond `num_computed` tokens: their content was planned but never computed."""
        for block in request.blocks[num_computed // self.block_size : request.num_hashed_blocks]:
            if block.block_hash is not None and block.ref_cnt == 1:
                self.pool.uncache(block)

    def forget_unsettled(self, failed_step: int) -> set[KVCacheBlock]:
        """A step broke: whatever it or a later one was to fill can't be found any more. Returns those blocks.

        Loads into tables that contain one of them will count as failed.
        """
        worthless = {block for step, block in self._unsettled if step >= failed_step}
        for block in worthless:
            self.pool.forget(block)
        for name, blocks in self._held.items():
            if not worthless.isdisjoint(blocks):
                self._doomed_loads.add(name)
        return worthless

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(request.adapter, request.cache_salt)
        for start in range(len(hashes) * size, num_blocks * size, size):
            media = media_keys(request.media, start, start + size) if request.media else ()
            parent = block_hash(parent, request.token_ids[start : start + size], media)
            hashes.append(parent)

    # ---- transfers ------------------------------------------------------------------------------------------

    def hold_for_load(self, request: Request) -> None:
        """A connector fills a request's new blocks: until then the transfer holds all of them."""
        self._held[f"load:{request.request_id}"] = request.blocks
        request.blocks = []
        request.num_slots = request.num_hashed_blocks = 0
        request.hash_at = NEVER

    def is_transferring(self, request_id: str) -> bool:
        """Whether a transfer still holds blocks under this request id."""
        return f"load:{request_id}" in self._held or f"send:{request_id}" in self._held

    def end_load(self, request_id: str, request: Request | None, is_ok: bool) -> bool | None:
        """A load has ended: give its blocks to `request`, or free them if it failed or the request is gone.

        Returns whether the request has them now; None if no such load is known.
        """
        name = f"load:{request_id}"
        blocks = self._held.pop(name, None)
        if blocks is None:
            return None
        is_doomed = name in self._doomed_loads
        self._doomed_loads.discard(name)
        if request is None or not is_ok or is_doomed:
            self.pool.release(blocks)
            return False
        request.blocks = blocks
        request.num_slots = request.num_computed_tokens = len(blocks) * self.block_size
        request.hash_at = 0 if self.prefix_caching else NEVER
        self.hash_full_blocks(request, request.num_slots)
        return True

    def hold_for_send(self, request: Request) -> None:
        """A request has ended, but a connector still reads its blocks."""
        self._held[f"send:{request.request_id}"] = request.blocks
        self._last_write[request.request_id] = request.planned_in
        request.blocks = []

    def end_send(self, request_id: str) -> bool:
        """The connector is done with an ended request's blocks; False if it held none."""
        blocks = self._held.pop(f"send:{request_id}", None)
        if blocks is None:
            return False
        last_write = self._last_write.pop(request_id)
        if last_write > self._settled_step:
            self._pending.append((last_write, blocks))
        else:
            self.pool.release(blocks)
        return True

    # ---- freeing --------------------------------------------------------------------------------------------

    def free(self, request: Request, until_step: int | None = None) -> int:
        """Give all of a request's blocks back and return how many; with `until_step`, only once that step is done."""
        blocks = request.blocks
        request.blocks = []
        request.num_slots = request.num_hashed_blocks = 0
        request.hash_at = NEVER
        if until_step is None:
            self.pool.release(blocks)
        elif blocks:
            self._pending.append((until_step, blocks))
        return len(blocks)

    def settle(self, finished_step: int) -> None:
        """A step is done: free what waited for it or an earlier one; what they filled is really there."""
        self._settled_step = finished_step
        while self._unsettled and self._unsettled[0][0] <= finished_step:
            self._unsettled.popleft()
        while self._pending and self._pending[0][0] <= finished_step:
            self.pool.release(self._pending.pop(0)[1])

    def reset(self) -> bool:
        """Forget every cached prefix; False (and no change) while blocks are in use."""
        if self.pool.num_free != self.pool.num_usable:
            return False
        self.pool.forget_free()
        return True

    # ---- books ----------------------------------------------------------------------------------------------

    def usage(self) -> PoolUsage:
        """Blocks by use: free + in_use + held + pending = usable."""
        pool = self.pool
        held, pending = self._num_held_and_pending()
        return PoolUsage(
            usable=pool.num_usable,
            free=pool.num_free,
            in_use=pool.num_usable - pool.num_free - held - pending,
            held=held,
            pending=pending,
            cached=pool.num_cached_free,
            shared=pool.num_shared,
            block_size=self.block_size,
        )

    def block_states(self) -> str:
        """One letter per usable block as `KvMap` explains them."""
        if not self._held and not self._pending:
            return self.pool.states()
        states, first = list(self.pool.states()), self.pool.first_usable_id
        for letter, groups in (("h", self._held.values()), ("p", [blocks for _, blocks in self._pending])):
            for block in (block for blocks in groups for block in blocks):
                if block.ref_cnt == 1:
                    states[block.block_id - first] = letter
        return "".join(states)

    def _num_held_and_pending(self) -> tuple[int, int]:
        """Blocks kept for transfers, and blocks whose free is pending; what a live request uses as well is neither."""
        held = Counter(block for blocks in self._held.values() for block in blocks)
        pending = Counter(block for _, blocks in self._pending for block in blocks)
        idle = [block for block, count in (held + pending).items() if count == block.ref_cnt]
        num_held = sum(block in held for block in idle)
        return num_held, len(idle) - num_held

    def faults(self, requests: Sequence[Request]) -> list[str]:
        """Check every reference against its holder; one sentence per fault."""
        users: dict[int, int] = {}
        tables = [request.blocks for request in requests]
        tables += [blocks for _, blocks in self._pending]
        tables += list(self._held.values())
        for table in tables:
            for block in table:
                users[block.block_id] = users.get(block.block_id, 0) + 1
        faults = self.pool.faults(users)
        for request in requests:
            if request.num_slots != len(request.blocks) * self.block_size:
                faults.append(f"{request} has {request.num_slots} slots in {len(request.blocks)} blocks")
            if request.num_computed_tokens > request.num_slots:
                faults.append(f"{request} has computed more tokens than its {request.num_slots} slots")
        return faults
