"""Connects an engine to a KV store: opens the store that a URL names and builds both sides of the connector over it."""

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from schedtop.engine.core import EngineCore
from schedtop.engine.errors import ConfigError
from schedtop.engine.kv.connector.folder import FolderStore
from schedtop.engine.kv.connector.format import KVFormat
from schedtop.engine.kv.connector.redis import RedisStore
from schedtop.engine.kv.connector.store import BlockStore, StoreConnector
from schedtop.engine.runner.kv_transfer import KVTransferWorker, TransferringRunner
from schedtop.engine.sched import transfers

_REDIS_SCHEMES = ("redis", "rediss", "unix")


def open_store(url: str, kv_format: KVFormat) -> BlockStore:
    """`folder:PATH`, `redis://host:port/db`, `rediss://...` or `unix:///socket`. Raises `ConfigError` for others."""
    scheme, _, rest = url.partition(":")
    if scheme == "folder" and rest:
        return FolderStore(Path(rest).expanduser(), kv_format)
    if scheme in _REDIS_SCHEMES:
        return RedisStore(url, kv_format)
    raise ConfigError(f"KV store {url!r} is unknown: give folder:PATH, redis://host:port/db or unix:///path")


def attach_store(
    core: EngineCore,
    runner: TransferringRunner,
    store: BlockStore,
    *,
    reads: Executor | None = None,
    writes: Executor | None = None,
) -> None:
    """Connect an engine that hasn't served yet to a store. `reads` and `writes` are where its I/O runs."""
    scheduler = core.scheduler
    reads = reads or ThreadPoolExecutor(2, thread_name_prefix="kv-read")
    writes = writes or ThreadPoolExecutor(1, thread_name_prefix="kv-write")
    connector = StoreConnector(
        store,
        core.config.block_size,
        submit=reads.submit,
        post=core.post,
        answered=lambda request_id: transfers.connector_answered(scheduler, request_id),
    )
    scheduler.connect(connector)
    runner.transfer = KVTransferWorker(
        runner.memory,
        store,
        lambda request_id, is_ok: core.post(lambda: transfers.load_finished(scheduler, request_id, is_ok)),
        reads=reads,
        writes=writes,
        async_depth=core.config.async_depth,
    )
