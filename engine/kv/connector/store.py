"""A KV connector over any store that keeps blocks by content hash: what an engine computed, another starts from.

The scheduler's side. Nothing here waits for I/O: asking the store happens in another thread, and until it has answered
the request waits aside. Bytes are moved by `engine/runner/kv_transfer.py`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from schedtop.engine.kv.connector.base import BlockTransfer, KVConnectorMetadata
from schedtop.engine.request import Request

log = logging.getLogger(__name__)

NUM_KNOWN = 1 << 16
"""Block hashes remembered as saved, so that blocks shared by many requests are written once."""

Job = Callable[[], None]


class BlockStore(Protocol):
    """Keeps blocks by content hash. Calls come from several threads and may take their time.

    It should answer as if empty rather than raise when what it is built on is gone; whoever calls it survives both.
    """

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys, in a row, are there."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """A block's content; None when it isn't there, or there but not whole."""
        ...

    def put(self, key: bytes, content: bytes) -> None:
        """Keep a block; a second put of a key changes nothing."""
        ...

    def close(self) -> None:
        """Release what it holds; idempotent."""
        ...


@dataclass(slots=True)
class _Query:
    """One question: how much of a request's prefix is there from block `start` on; None = not answered yet."""

    start: int
    num_found: int | None = None


class StoreConnector:
    """Implements `KVConnector` over a `BlockStore`.

    `submit` runs a job in another thread, `post` one in the core thread, `answered` has the scheduler look at a request
    again. A request of an adapter is neither loaded nor saved: its name doesn't say which weights the others have.
    """

    def __init__(
        self,
        store: BlockStore,
        block_size: int,
        *,
        submit: Callable[[Job], object],
        post: Callable[[Job], None],
        answered: Callable[[str], None],
    ) -> None:
        self._store = store
        self._block_size = block_size
        self._submit = submit
        self._post = post
        self._answered = answered
        self._queries: dict[str, _Query] = {}
        self._loads: list[BlockTransfer] = []
        self._num_saved: dict[str, int] = {}
        """Blocks of each live request that have been looked at for saving."""
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens the store has beyond those computed; None until it has answered."""
        start = num_computed_tokens // self._block_size
        wanted = request.block_hashes[start : (request.num_tokens - 1) // self._block_size]
        if not wanted or request.adapter is not None:
            return 0
        query = self._queries.get(request.request_id)
        if query is None or (query.num_found is not None and start < query.start):  # a local hit is gone since
            self._ask(request.request_id, start, wanted)
            return None
        if query.num_found is None:
            return None
        return max(0, query.start + query.num_found - start) * self._block_size

    def _ask(self, request_id: str, start: int, keys: list[bytes]) -> None:
        query = self._queries[request_id] = _Query(start)

        def ask() -> None:
            num_found = 0
            try:
                num_found = self._store.count_prefix(keys)
            except Exception:
                log.exception("KV store: asking for the prefix of %s failed; it is computed here", request_id)
            self._post(lambda: self._take_answer(request_id, query, num_found))

        self._submit(ask)

    def _take_answer(self, request_id: str, query: _Query, num_found: int) -> None:
        query.num_found = num_found
        if self._queries.get(request_id) is query:  # not if the request is gone, its id perhaps in use again
            self._answered(request_id)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Have the new blocks loaded with the step being planned."""
        start = num_computed_tokens // self._block_size
        hashes = request.block_hashes[start : start + len(block_ids)]
        self._loads.append(BlockTransfer(request_id=request.request_id, block_hashes=hashes, block_ids=list(block_ids)))
        self._queries.pop(request.request_id, None)

    def build_connector_meta(self, scheduled: Sequence[Request]) -> KVConnectorMetadata | None:
        """Loads begun while this step was planned, and the blocks that it fills for the first time."""
        loads, self._loads = self._loads, []
        meta = KVConnectorMetadata(loads, list(self._fresh_blocks(scheduled)))
        return meta or None

    def _fresh_blocks(self, scheduled: Sequence[Request]) -> Iterator[BlockTransfer]:
        num_saved = self._num_saved
        for request in scheduled:
            start = num_saved.get(request.request_id, 0)
            if request.num_hashed_blocks <= start or request.adapter is not None:
                continue
            self._queries.pop(request.request_id, None)
            num_saved[request.request_id] = request.num_hashed_blocks
            places = [
                index for index in range(start, request.num_hashed_blocks) if self._is_new(request.block_hashes[index])
            ]
            if places:
                yield BlockTransfer(
                    request_id=request.request_id,
                    block_hashes=[request.block_hashes[index] for index in places],
                    block_ids=[request.blocks[index].block_id for index in places],
                )

    def _is_new(self, key: bytes) -> bool:
        is_new = key not in self._known
        self._known[key] = None
        self._known.move_to_end(key)
        if len(self._known) > NUM_KNOWN:
            self._known.popitem(last=False)
        return is_new

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Nothing is kept: what was to be saved was copied when its step ended."""
        self._queries.pop(request.request_id, None)
        self._num_saved.pop(request.request_id, None)
        return False
