"""Request traces in CSV: when a request came, how long its prompt and its answer were.

Reads the public shapes (the Azure LLM inference traces, BurstGPT) and any other whose column names say what they hold.
What is done with the rows is `load.py`'s.
"""

import csv
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from schedtop.engine.errors import SchedtopError

if TYPE_CHECKING:
    import _csv

COLUMNS: dict[str, tuple[str, ...]] = {
    "arrival": ("timestamp", "arrival", "arrivaltime", "arrivaltimestamp", "arrivedat", "arrivals", "time", "ats"),
    "prompt": (
        "contexttokens", "requesttokens", "prompttokens", "inputtokens", "promptlength", "inputlength", "promptlen",
        "inputlen", "numprompttokens", "prompt",
    ),
    "output": (
        "generatedtokens", "responsetokens", "outputtokens", "completiontokens", "outputlength", "outputlen",
        "responselength", "numoutputtokens", "output",
    ),
}  # fmt: skip
"""What is needed, and names of its column: compared in lower case, letters and digits only."""
MAX_TOKENS = 10_000_000


class BadTrace(SchedtopError):
    """A trace that can't be read; the message names file, line, value and what was expected."""

    code = "bad_trace"


class TraceRow(msgspec.Struct, frozen=True, gc=False):
    """One request: seconds after the first one of the file, and its lengths in tokens."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


class Trace(msgspec.Struct, frozen=True):
    """The rows in order of time, and how many of the file had no answer (failed requests) and were left out."""

    rows: list[TraceRow]
    num_left_out: int


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The first `limit` rows of a file. Raises `BadTrace`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            raw = list(_rows(path, csv.reader(file), limit))
    except OSError as error:
        raise BadTrace(f"trace {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadTrace(f"trace {path} isn't CSV in UTF-8: {error}") from None
    answered = [row for row in raw if row.num_output_tokens]
    if not answered:
        raise BadTrace(f"trace {path} holds no request with an answer")
    first = min(row.at_s for row in answered)
    shifted = [TraceRow(row.at_s - first, row.num_prompt_tokens, row.num_output_tokens) for row in answered]
    return Trace(sorted(shifted, key=lambda row: row.at_s), len(raw) - len(answered))


def _rows(path: Path, lines: "_csv.Reader", limit: int | None) -> Iterator[TraceRow]:
    header = next(lines, None)
    if header is None:
        raise BadTrace(f"trace {path} is empty: its first line must name the columns")
    places = _places(path, header)
    for cells in islice(lines, limit):
        if not cells:
            continue
        where = f"trace {path}, line {lines.line_num}"
        if len(cells) != len(header):
            raise BadTrace(f"{where}: {len(cells)} cells, the first line names {len(header)} columns")
        arrival, prompt, output = (cells[place] for place in places)
        yield TraceRow(
            _seconds(where, header[places[0]], arrival),
            _tokens(where, header[places[1]], prompt, least=1),
            _tokens(where, header[places[2]], output, least=0),
        )


def _places(path: Path, header: Sequence[str]) -> list[int]:
    """Where arrival, prompt and output stand."""
    names = ["".join(filter(str.isalnum, name.lower())) for name in header]
    places = []
    for what, known in COLUMNS.items():
        found = [name for name in known if name in names]
        if not found:
            raise BadTrace(
                f"trace {path}, line 1: no column for {what} among {', '.join(map(repr, header))}; "
                f"call it one of {', '.join(known)}"
            )
        places.append(names.index(found[0]))
    return places


def _seconds(where: str, column: str, text: str) -> float:
    """A number of seconds, or a date and time."""
    try:
        seconds = float(text)
        if 0 <= seconds < float("inf"):
            return seconds
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadTrace(
            f"{where}: {column}={text!r} is neither seconds (0 or more) nor a time such as 2023-11-16 18:15:46.68"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(where: str, column: str, text: str, least: int) -> int:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if number != number or number != int(min(max(number, -1), MAX_TOKENS)) or number < least:
        raise BadTrace(f"{where}: {column}={text!r} is no number of tokens: give {least} to {MAX_TOKENS:,}")
    return int(number)
