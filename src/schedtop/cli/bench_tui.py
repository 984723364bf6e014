"""`schedtop bench tui`: what the screen costs, under a pseudo-terminal, on an engine with thousands of live requests.

Peers (vllmstat, vllm-htop, vllmpytop, vllm-mon) are measured in the same run on the same engine's `/metrics`, when the
Python given with `--peers-python` has them. How things are measured is in `screen_meter.py`.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from schedtop.cli.engine import say_json, table
from schedtop.cli.screen_meter import Cost, Screen, measure
from schedtop.control.client import Client
from schedtop.control.messages import AbortRequests, AddRequest, RequestFilter
from schedtop.engine.errors import ConfigError
from schedtop.engine.sampling_params import SamplingParams

PREFIX = "rq-"
START_LIMIT_S = 60.0
_SIZES = ("--num-kv-blocks", "40001", "--max-num-batched-tokens", "4096", "--max-num-seqs", "256")

PEERS: dict[str, tuple[str, ...]] = {
    "vllmstat": ("vllmstat", "--url", "{url}"),
    "vllm-htop": ("vllm-htop", "--url", "{url}"),
    "vllmpytop": ("vllmpytop", "--url", "{url}"),
    "vllm-mon": ("vllm-dash", "--url", "{url}", "--db", "{folder}/vllm-mon.db"),
}
"""Package -> its program and arguments, with the gateway's address; each refreshes as often as it does by default."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    requests: int
    columns: int
    lines: int
    rows: list[Cost]
    skipped: dict[str, str]
    """Peer -> why it wasn't measured."""


@click.command()
@click.option("--requests", default=5000, type=click.IntRange(1), show_default=True, help="Live requests.")
@click.option("--columns", default=120, type=click.IntRange(40, 400), show_default=True)
@click.option("--lines", default=40, type=click.IntRange(10, 120), show_default=True)
@click.option(
    "--seconds", default=10.0, type=click.FloatRange(1), show_default=True, help="Length of each measurement."
)
@click.option("--keys", default=30, type=click.IntRange(0), show_default=True, help="Key presses timed.")
@click.option("--peers-python", metavar="PY", help="A Python that has peers installed: measure those too.")
@click.option("--json", "as_json", is_flag=True, help="Unrounded values.")
def tui(
    requests: int, columns: int, lines: int, seconds: float, keys: int, peers_python: str | None, as_json: bool
) -> None:
    """CPU seconds to the first data, share of a core at 4 Hz, memory, bytes per refresh, time to answer a key."""
    size = (columns, lines)
    with tempfile.TemporaryDirectory(prefix="st") as folder, engine(Path(folder)) as (socket, url, environment):
        screen = Screen(
            name="schedtop", command=[*_SCHEDTOP, "--connect", socket], environment=environment, size=size,
            first_data=PREFIX, key="?", answered_by="this help", key_back="q",
        )  # fmt: skip
        found, skipped = peers(peers_python, url, environment, size)
        idle = measure(_idle(screen), seconds, 0)
        with live_requests(socket, requests):
            rows = [*(measure(each, seconds, keys) for each in (screen, *found)), idle]
    report = Report(requests=requests, columns=columns, lines=lines, rows=rows, skipped=skipped)
    if as_json:
        say_json(report)
    else:
        click.echo(in_words(report))


_SCHEDTOP = [sys.executable, "-P", "-m", "schedtop"]


def _idle(screen: Screen) -> Screen:
    return msgspec.structs.replace(screen, name="schedtop, idle engine", first_data="generation 0", key="")


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    """A simulated engine and its gateway in folders of its own: socket, URL, environment for whoever looks at it."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("SCHEDTOP_")}
    folders = {f"XDG_{name}": str(folder / name.lower()) for name in ("RUNTIME_DIR", "STATE_HOME", "CONFIG_HOME")}
    environment = base | folders | {"PYTHONUNBUFFERED": "1", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    environment.pop("NO_COLOR", None)
    (folder / "runtime_dir").mkdir(mode=0o700)
    socket = str(folder / "engine.sock")
    command = [*_SCHEDTOP, "serve", "--runner", "simulated", "--port", "0", "--drain", "0", "--socket", socket, *_SIZES]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = next((line.split()[-1] for line in process.stdout if line.startswith("gateway on ")), None)
        if url is None:
            raise ConfigError("the engine to measure on didn't start: does `schedtop serve --runner simulated` work?")
        yield socket, url, environment
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def live_requests(socket: str, count: int) -> Iterator[None]:
    """`count` live requests, handed in by a process of its own, so that their tokens are no work of this one."""
    command = [sys.executable, "-P", "-m", "schedtop.cli.bench_tui", socket, str(count)]
    load = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert load.stdout is not None
        if not load.stdout.readline():
            raise ConfigError(f"{count} requests could not be handed in")
        yield
    finally:
        load.communicate()  # its standard input ends: it takes its requests back


async def hold_requests(socket: str, count: int) -> None:
    """Hand in requests, say so, and keep them until standard input ends."""
    sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
    async with await Client.connect(socket, name="bench load") as client:

        async def add(number: int) -> None:
            prompt = [number % 1000 + 1] * (16 + number % 64)
            name = f"{PREFIX}{number:05d}"
            await client.request(AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))

        for first in range(0, count, 500):  # each is answered at a step's end: one by one takes minutes
            await asyncio.gather(*map(add, range(first, min(first + 500, count))))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await client.request(AbortRequests(select=RequestFilter(id_prefix=PREFIX)))


def peers(
    python: str | None, url: str, environment: dict[str, str], size: tuple[int, int]
) -> tuple[list[Screen], dict[str, str]]:
    """The peers that are installed, and why the others are left out."""
    if python is None:
        return [], dict.fromkeys(PEERS, "no --peers-python given")
    found, skipped = [], {}
    for name, (program_name, *arguments) in PEERS.items():
        program = shutil.which(str(Path(python).parent / program_name))
        if program is None:
            skipped[name] = f"not installed beside {python}"
            continue
        folder = Path(environment["XDG_STATE_HOME"]).parent
        command = [program, *(argument.format(url=url, folder=folder) for argument in arguments)]
        found.append(Screen(name=name, command=command, environment=environment, size=size))
    return found, skipped


def in_words(report: Report) -> str:
    """A table, and what is missing from it."""
    heads = (
        "",
        "CPU s to data",
        "% of a core",
        "MB",
        "refreshes/s",
        "bytes/refresh",
        "kB/s",
        "key p50 ms",
        "key p99 ms",
    )
    lines = [
        f"{report.requests} live requests, {report.columns}x{report.lines}; ours asks for 4 refreshes a second",
        table(heads, [_cells(cost) for cost in report.rows]),
    ]
    lines += [f"{cost.name}: {cost.fault}" for cost in report.rows if cost.fault]
    return "\n".join(lines + [f"{name}: skipped, {why}" for name, why in report.skipped.items()])


def _cells(cost: Cost) -> Sequence[str]:
    def cell(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    keys = (cell(None if value is None else value * 1e3, 0) for value in (cost.key_p50_s, cost.key_p99_s))
    return (
        cost.name, cell(cost.first_data_cpu_s), cell(cost.core_percent, 1), cell(cost.memory_mb, 1),
        cell(cost.refreshes_per_s, 1), cell(cost.bytes_per_refresh, 0), cell(cost.kilobytes_per_s, 1), *keys,
    )  # fmt: skip


if __name__ == "__main__":
    asyncio.run(hold_requests(sys.argv[1], int(sys.argv[2])))
