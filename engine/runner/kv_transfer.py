"""The worker's side of a KV connector: moves blocks between the runner's KV cache and a store. Torch-free.

Loads and writes to the store happen in other threads; blocks to be saved are copied before the next step may overwrite
them. Which blocks, and when, the scheduler's side decides (`engine/kv/connector`).
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, runtime_checkable

from schedtop.engine.kv.connector.base import BlockTransfer, KVConnectorMetadata
from schedtop.engine.kv.connector.format import KVFormat
from schedtop.engine.kv.connector.store import BlockStore
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput

log = logging.getLogger(__name__)

MAX_PENDING_SAVES = 256
"""Blocks copied and not yet written at most: a slow store costs saves, not memory."""


class BlockMemory(Protocol):
    """A runner's KV cache, block by block, all layers together."""

    def format(self, model: str, namespace: str = "") -> KVFormat:
        """What its blocks are, for a model whose weights have this fingerprint."""
        ...

    def read_block(self, block_id: int) -> bytes:
        """A copy of a block's content."""
        ...

    def write_block(self, block_id: int, content: bytes) -> None:
        """Fill a block that no step uses meanwhile."""
        ...


class KVTransfer(Protocol):
    """What a runner calls around each step's forward pass."""

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        """Before the forward pass: begin the step's loads and return."""
        ...

    def wait_for_save(self, meta: KVConnectorMetadata, step: int) -> None:
        """After the forward pass: return when the blocks to be saved may be overwritten."""
        ...

    def step_failed(self, step: int) -> None:
        """The forward pass broke: steps planned before that was known may have computed on nothing."""
        ...

    def shutdown(self) -> None:
        """Write what was copied and release the store; idempotent."""
        ...


class NoTransfer:
    """For runners without a connector."""

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        """Never called with anything to load."""

    def wait_for_save(self, meta: KVConnectorMetadata, step: int) -> None:
        """Never called with anything to save."""

    def step_failed(self, step: int) -> None:
        """Nothing was to be saved."""

    def shutdown(self) -> None:
        """Nothing is held."""


class KVTransferWorker:
    """Implements `KVTransfer` over a store. `load_finished(request id, is ok)` is called in a thread of `reads`.

    After a failed step nothing of the next `async_depth` steps is saved: they were planned over its result.
    """

    def __init__(
        self,
        memory: BlockMemory,
        store: BlockStore,
        load_finished: Callable[[str, bool], None],
        *,
        reads: Executor,
        writes: Executor,
        async_depth: int = 1,
    ) -> None:
        self._memory = memory
        self._store = store
        self._load_finished = load_finished
        self._reads, self._writes = reads, writes
        self._async_depth = async_depth
        self._first_sound_step = 0
        self._free_copies = threading.Semaphore(MAX_PENDING_SAVES)
        self.num_dropped_saves = 0
        """Blocks not saved, because the store is too slow or refused them."""

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        """Begin the step's loads."""
        for transfer in meta.loads:
            self._reads.submit(self._load, transfer)

    def _load(self, transfer: BlockTransfer) -> None:
        is_ok = False
        try:
            is_ok = self._fill(transfer)
        except Exception:
            log.exception("KV load of %s failed; its prompt is computed here", transfer.request_id)
        self._load_finished(transfer.request_id, is_ok)

    def _fill(self, transfer: BlockTransfer) -> bool:
        for key, block_id in zip(transfer.block_hashes, transfer.block_ids, strict=True):
            content = self._store.get(key)
            if content is None:
                return False
            self._memory.write_block(block_id, content)
        return True

    def wait_for_save(self, meta: KVConnectorMetadata, step: int) -> None:
        """Copy the blocks to be saved and leave writing them to another thread."""
        if step < self._first_sound_step:
            return
        for transfer in meta.saves:
            for key, block_id in zip(transfer.block_hashes, transfer.block_ids, strict=True):
                if self._free_copies.acquire(blocking=False):
                    self._writes.submit(self._put, key, self._memory.read_block(block_id))
                else:
                    self.num_dropped_saves += 1

    def _put(self, key: bytes, content: bytes) -> None:
        try:
            self._store.put(key, content)
        except Exception as error:
            self.num_dropped_saves += 1
            log.warning("KV block not saved: %s", error)
        finally:
            self._free_copies.release()

    def step_failed(self, step: int) -> None:
        """Save nothing of the steps that were planned over this one's result."""
        self._first_sound_step = step + self._async_depth + 1

    def shutdown(self) -> None:
        """Write what was copied and release the store."""
        self._reads.shutdown(wait=True)
        self._writes.shutdown(wait=True)
        self._store.close()


@runtime_checkable
class TransferringRunner(Protocol):
    """A runner that can take part in KV transfers."""

    transfer: KVTransfer
    memory: BlockMemory


def run_with_transfers(
    transfer: KVTransfer, output: SchedulerOutput, run_step: Callable[[SchedulerOutput], ModelRunnerOutput]
) -> ModelRunnerOutput:
    """A runner's step, with the step's loads begun before it and its saves copied after it."""
    meta = output.kv_connector_metadata
    if meta is not None:
        transfer.start_load_kv(meta)
    try:
        result = run_step(output)
    except Exception:
        transfer.step_failed(output.step)
        raise
    if meta is not None:
        transfer.wait_for_save(meta, output.step)
    return result
