"""KV blocks in a folder that engines share: one file per block, under the format's fingerprint.

Files appear whole (written aside, then renamed) and may be deleted by anybody at any time.
"""

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from schedtop.engine.errors import ConfigError
from schedtop.engine.kv.connector.format import BadBlock, KVFormat

log = logging.getLogger(__name__)


class FolderStore:
    """Implements `BlockStore`. Raises `ConfigError` when the folder can't be used."""

    def __init__(self, folder: Path, kv_format: KVFormat) -> None:
        self.root = folder / kv_format.fingerprint
        self._format = kv_format
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"KV store folder {str(folder)!r} can't be used: {error.strerror}; give a folder that can be written"
            ) from None

    def count_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys, in a row, have a file of the right size or more."""
        for count, key in enumerate(keys):
            try:
                if self.path_of(key).stat().st_size < self._format.num_bytes:
                    return count
            except OSError:
                return count
        return len(keys)

    def get(self, key: bytes) -> bytes | None:
        """A block's content. A file that isn't that block is removed, so that a good one can take its place."""
        path = self.path_of(key)
        try:
            return self._format.unpack(key, path.read_bytes())
        except OSError:
            return None
        except BadBlock as error:
            log.warning("KV block %s is ignored and removed: %s", path, error)
            path.unlink(missing_ok=True)
            return None

    def put(self, key: bytes, content: bytes) -> None:
        """Write a block unless it is there. Raises `OSError` when it can't."""
        path = self.path_of(key)
        if self.count_prefix([key]):
            return
        path.parent.mkdir(exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            aside.write_bytes(self._format.pack(key, content))
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Nothing is held open."""

    def path_of(self, key: bytes) -> Path:
        """Where a block is kept: 256 sub-folders, so that none grows huge."""
        name = key.hex()
        return self.root / name[:2] / f"{name}.kv"
