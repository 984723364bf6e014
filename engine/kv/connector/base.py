"""KV connectors: KV blocks that come from, or go to, somewhere else (another engine, a folder, Redis).

The scheduler's side of the seam, torch-free. The worker's side, which moves bytes, is `engine/runner/kv_transfer.py`.
Hook names follow vLLM's connector interface where the thing is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from schedtop.engine.request import Request


class BlockTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one request to be loaded or saved: content hash and block id, pairwise."""

    request_id: str
    block_hashes: list[bytes]
    block_ids: list[int]


@dataclass(slots=True)
class KVConnectorMetadata:
    """What the worker is to move in one step."""

    loads: list[BlockTransfer] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves)


class KVConnector(Protocol):
    """What the scheduler asks of a connector. All calls come from the core thread and must not wait for I/O."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens beyond `num_computed_tokens` that can be loaded, in whole blocks; None = not known yet, ask again
        after `transfers.connector_answered`."""

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Blocks to load into were allocated, for the tokens from `num_computed_tokens` on."""

    def build_connector_meta(self, scheduled: Sequence[Request]) -> KVConnectorMetadata | None:
        """Loads and saves of the step just planned for `scheduled`; None = nothing to move."""

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """A request has ended (its blocks may be none). True: keep the blocks until `transfers.send_finished`."""


class NoConnector:
    """For engines that share no KV."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Nothing can be loaded."""
        return 0

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Never called: nothing is loaded."""

    def build_connector_meta(self, scheduled: Sequence[Request]) -> KVConnectorMetadata | None:
        """Nothing to move."""
        return None

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Nothing to keep."""
        return False
