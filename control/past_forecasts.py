"""Forecasts that were made, and what then really happened: an SQLite file beside the audit logs.

Whoever makes a forecast keeps it here; whoever asks later, while the engine still holds its steps of that time, sets
what happened beside it. The engine itself knows nothing of it.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from schedtop.engine.errors import SchedtopError
from schedtop.engine.sim.outlook import Forecast, Outlook, Tally, outlook_over
from schedtop.engine.snapshot import StepRecord

FILE_NAME = "forecasts.sqlite"
MAX_KEPT = 1000
"""The oldest go first."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS forecast (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    wall REAL NOT NULL,
    boot_id TEXT NOT NULL,
    engine TEXT NOT NULL,
    foretold TEXT NOT NULL,
    became TEXT NOT NULL DEFAULT '',
    happened TEXT NOT NULL DEFAULT 'null'
)
"""


class HistoryFailed(SchedtopError):
    """The file can't be read or written."""

    code = "forecast_history"


class PastForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast. `became`: what was done about it, empty while that isn't known."""

    id: int
    wall: float
    boot_id: str
    engine: str
    foretold: Forecast
    became: str = ""
    """`applied`, `not applied`, `other knobs turned`, `not seen`."""
    happened: Outlook | None = None

    @property
    def expected(self) -> Outlook | None:
        """The outlook to compare with what happened."""
        return {"applied": self.foretold.then, "not applied": self.foretold.now}.get(self.became)


class PastForecasts:
    """The file. Methods raise `HistoryFailed`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, engine: str, boot_id: str, wall: float, foretold: Forecast) -> int:
        """Store a new one and return its number; beyond `MAX_KEPT` the oldest are dropped."""
        with self._open() as database:
            number = database.execute(
                "INSERT INTO forecast (wall, boot_id, engine, foretold) VALUES (?, ?, ?, ?)",
                (wall, boot_id, engine, _json(msgspec.structs.replace(foretold, starts=[]))),
            ).lastrowid
            assert number is not None
            database.execute("DELETE FROM forecast WHERE id <= ?", (number - MAX_KEPT,))
        return number

    def note(self, number: int, became: str, happened: Outlook | None) -> None:
        """Set beside a forecast what happened."""
        with self._open() as database:
            database.execute(
                "UPDATE forecast SET became = ?, happened = ? WHERE id = ?", (became, _json(happened), number)
            )

    def newest(self, limit: int) -> list[PastForecast]:
        """The newest, newest first."""
        return self._select("ORDER BY id DESC LIMIT ?", (limit,))

    def open_ones(self, boot_id: str) -> list[PastForecast]:
        """Those of a running engine of which it isn't known yet what happened, oldest first."""
        return self._select("WHERE boot_id = ? AND became = '' ORDER BY id", (boot_id,))

    def _select(self, rest: str, values: Sequence[Any]) -> list[PastForecast]:
        with self._open() as database:
            rows = database.execute(
                f"SELECT id, wall, boot_id, engine, foretold, became, happened FROM forecast {rest}", values
            ).fetchall()
        return [
            PastForecast(
                id=row[0], wall=row[1], boot_id=row[2], engine=row[3],
                foretold=msgspec.json.decode(row[4], type=Forecast), became=row[5],
                happened=msgspec.json.decode(row[6], type=Outlook | None),
            )
            for row in rows
        ]  # fmt: skip

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with contextlib.closing(sqlite3.connect(self.path, timeout=10.0)) as database, database:
                database.execute(_SCHEMA)
                yield database
        except (OSError, sqlite3.Error, msgspec.MsgspecError) as error:
            raise HistoryFailed(f"the record of forecasts {self.path} can't be used: {error}") from None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# ---- what happened ----------------------------------------------------------------------------------------------


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can still tell: its newest steps, its audit rows, and its clock."""

    steps: list[StepRecord]
    audit: list[dict[str, Any]]
    mono: float


def judge(past: PastForecast, seen: Seen) -> tuple[str, Outlook | None] | None:
    """What became of a forecast and what happened; None while its horizon isn't over."""
    foretold = past.foretold
    turned = [row for row in seen.audit if row["boot_id"] == past.boot_id and _is_turn(row)]
    turned = sorted((row for row in turned if row["wall"] >= past.wall), key=lambda row: row["id"])
    turned = [row for row in turned if row["wall"] < past.wall + foretold.horizon_s]
    begin, became = foretold.mono, "not applied"
    if turned:
        if turned[0]["after"] != {name: then for name, (_, then) in foretold.changes.items()}:
            return "other knobs turned", None
        begin, became = _moment_of(turned[0]["step"], seen), "applied"
    end = begin + foretold.horizon_s
    later = [row for row in seen.audit if _is_turn(row) and turned and row["id"] > turned[0]["id"]]
    if any(_moment_of(row["step"], seen) < end for row in later):
        return "other knobs turned", None
    if seen.mono < end:
        return None
    if seen.steps and seen.steps[0].mono > begin and seen.steps[0].step > 1:
        return "not seen", None
    tally = Tally(begin)
    for record in seen.steps:
        if begin < record.mono <= end:
            tally.add(record)
    return became, outlook_over([tally], foretold.horizon_s)


def _is_turn(row: Mapping[str, Any]) -> bool:
    """Whether an audit row tells of knobs that got other values."""
    return bool(row["change_id"]) and row["outcome"] in ("done", "rolled back") and isinstance(row["after"], dict)


def _moment_of(step: int, seen: Seen) -> float:
    """Engine clock just before a step."""
    return next((record.mono - record.duration_s for record in seen.steps if record.step >= step), seen.mono)
