"""The audit log: who changed what, when and why, in an SQLite file that survives a kill.

One thread owns the database: rows that wait are committed together, and a row is on disk before its future is done.
What is worth a row is not decided here (`commands.py`).
"""

import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

import msgspec

from schedtop.engine.errors import ConfigError, SchedtopError

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    wall REAL NOT NULL,
    boot_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    uid INTEGER,
    client TEXT NOT NULL,
    on_behalf_of TEXT NOT NULL,
    action TEXT NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    change_id INTEGER NOT NULL,
    before TEXT NOT NULL,
    after TEXT NOT NULL
)
"""


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """Who did it: the uid at the other end of the socket, the client's own name, and for whom it spoke."""

    uid: int | None
    client: str
    on_behalf_of: str = ""

    def __str__(self) -> str:
        speaker = f"{self.on_behalf_of} via {self.client}" if self.on_behalf_of else self.client
        return speaker if self.uid is None else f"{speaker} (uid {self.uid})"


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. `before` and `after` are JSON-able; `step` is the first one that saw the effect."""

    wall: float
    boot_id: str
    step: int
    actor: Actor
    action: str
    outcome: str
    """`done`, `refused`, `rolled back`, `failed`."""
    reason: str = ""
    """Why, in the actor's words."""
    detail: str = ""
    """What happened, in ours."""
    change_id: int = 0
    before: Any = None
    after: Any = None


class AuditFailed(SchedtopError):
    """A row couldn't be written: what it tells has happened nevertheless."""

    code = "audit_failed"


_Job = Callable[[sqlite3.Connection], Any]


class AuditLog:
    """Appends rows and reads them back. Thread-safe; every result comes as a future."""

    def __init__(self, path: Path) -> None:
        """Open or make the file (0600). Raises `ConfigError` if that can't be done."""
        self.path = path
        self.failure = ""
        """Why the newest row couldn't be written; empty once one could."""
        self._jobs: queue.SimpleQueue[tuple[_Job, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        try:
            _make_private(path)
            _open(path).close()
        except (OSError, sqlite3.Error, ValueError) as error:
            raise ConfigError(f"the audit log {path} can't be used: {error}; choose another with --audit") from None
        self._thread.start()

    def write(self, row: AuditRow) -> "Future[int]":
        """Append a row; done, with its number, when it is on disk."""
        values = _values(row)
        return self._submit(lambda database: _insert(database, values))

    def newest(self, limit: int) -> "Future[list[dict[str, Any]]]":
        """The newest rows, newest first."""
        return self._submit(lambda database: _newest(database, limit))

    def close(self) -> None:
        """Write what waits and close the file; idempotent."""
        self._jobs.put(None)
        self._thread.join()

    def _submit(self, job: _Job) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # whoever stops waiting can't cancel what will be written anyway
        self._jobs.put((job, done))
        return done

    def _run(self) -> None:
        with contextlib.closing(_open(self.path)) as database:
            while (first := self._jobs.get()) is not None:
                batch, is_last = [first], False
                with contextlib.suppress(queue.Empty):
                    while True:
                        if (more := self._jobs.get_nowait()) is None:
                            is_last = True
                            break
                        batch.append(more)
                self._carry_out(database, batch)
                if is_last:
                    return

    def _carry_out(self, database: sqlite3.Connection, batch: list[tuple[_Job, "Future[Any]"]]) -> None:
        """Run jobs in one transaction; their futures are done only after it is on disk."""
        num_before = database.total_changes
        try:
            with database:
                results = [job(database) for job, _ in batch]
        except sqlite3.Error as error:
            self.failure = f"the audit log couldn't be written: {error}"
            for _, done in batch:
                with contextlib.suppress(InvalidStateError):
                    done.set_exception(AuditFailed(self.failure))
            return
        if database.total_changes > num_before:
            self.failure = ""
        for (_, done), result in zip(batch, results, strict=True):
            with contextlib.suppress(InvalidStateError):  # nobody waits for it any more; the row stays
                done.set_result(result)


def _make_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _open(path: Path) -> sqlite3.Connection:
    """The database, in WAL mode with every commit flushed. Its own thread only."""
    database = sqlite3.connect(path, timeout=10.0)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, _SCHEMA_VERSION):
            raise ValueError(f"it was written by another version (schema {version}, not {_SCHEMA_VERSION})")
        database.execute(_SCHEMA)
        database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    except BaseException:
        database.close()
        raise
    return database


def _values(row: AuditRow) -> dict[str, Any]:
    return {
        "wall": row.wall,
        "boot_id": row.boot_id,
        "step": row.step,
        "uid": row.actor.uid,
        "client": row.actor.client,
        "on_behalf_of": row.actor.on_behalf_of,
        "action": row.action,
        "outcome": row.outcome,
        "reason": row.reason,
        "detail": row.detail,
        "change_id": row.change_id,
        "before": msgspec.json.encode(row.before).decode(),
        "after": msgspec.json.encode(row.after).decode(),
    }


def _insert(database: sqlite3.Connection, values: dict[str, Any]) -> int:
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    number = database.execute(f"INSERT INTO audit ({names}) VALUES ({marks})", values).lastrowid
    assert number is not None
    return number


def _newest(database: sqlite3.Connection, limit: int) -> list[dict[str, Any]]:
    cursor = database.execute("SELECT * FROM audit ORDER BY id DESC LIMIT ?", (limit,))
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, values, strict=True)) for values in cursor]
    for row in rows:
        row["before"], row["after"] = msgspec.json.decode(row["before"]), msgspec.json.decode(row["after"])
    return rows


def read_audit_file(path: Path, limit: int) -> list[dict[str, Any]]:
    """The newest rows of a log, newest first, whether or not an engine runs. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"there is no audit log {path}")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _newest(database, limit)
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise ConfigError(f"the audit log {path} can't be read: {error}") from None
