"""Records traces from vLLM's own scheduler, or checks recorded ones against it. Run with a vLLM 0.32 Python.

python record.py --check traces/*.json            is what they expect what vLLM does?
python record.py --to DIR --seeds 0:5 [KIND ...]  new traces, all kinds unless named
python record.py --to DIR --traces FILE ...       record `expect` anew for the traces in these files
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trace_kinds import KINDS, make_trace
from vllm_driver import record


def main() -> int:
    """Returns the exit status: 1 when a checked file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    parser.add_argument("--check", nargs="+", type=Path, metavar="FILE", help="trace files to compare with vLLM")
    parser.add_argument("--traces", nargs="+", type=Path, metavar="FILE", help="files whose traces to record anew")
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder for the recorded files")
    parser.add_argument("--seeds", default="0:1", metavar="A:B", help="seeds A to B-1 (default: 0:1)")
    options = parser.parse_args()
    if options.check:
        return check(options.check)
    if options.to is None:
        parser.error("name a folder for the recorded files: --to DIR")
    options.to.mkdir(parents=True, exist_ok=True)
    for name, trace in wanted(options):
        write(options.to / name, trace)
    return 0


def check(paths: list[Path]) -> int:
    """Record each file's trace again and compare; prints one line per file."""
    num_different = 0
    for path in paths:
        content = json.loads(path.read_text())
        is_equal = json.loads(json.dumps(record(content["trace"]))) == content["expect"]
        num_different += not is_equal
        print(f"{path.name}: {'ok' if is_equal else 'vLLM does otherwise'}")
    return 1 if num_different else 0


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, trace) of all that is to be recorded."""
    for path in options.traces or ():
        yield path.name, json.loads(path.read_text())["trace"]
    if options.traces and not options.kinds:
        return
    first, last = map(int, options.seeds.split(":"))
    for kind in options.kinds or KINDS:
        for seed in range(first, last):
            yield f"{kind}_{seed}.json", make_trace(kind, seed)


def write(path: Path, trace: dict[str, Any]) -> None:
    """Record a trace. One on which vLLM's scheduler itself fails (an assertion of its own) is reported, not written."""
    try:
        expect = record(trace)
    except Exception as error:  # whatever vLLM raises
        print(f"{path.name}: vLLM fails on it: {type(error).__name__}: {error}", file=sys.stderr)
        return
    path.write_text(json.dumps({"trace": trace, "expect": expect}, separators=(",", ":")))


if __name__ == "__main__":
    sys.exit(main())
