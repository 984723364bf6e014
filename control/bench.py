"""What watchers cost the engine: step times with and without clients, in rounds that alternate.

The engine and its control server run in this process, its steps on the simulated runner in real time; clients are in
another process (`bench_clients.py`), as they are in life. Nothing is printed here. Wall time is what users feel, the
engine thread's CPU time depends less on what else the machine does, and that of the serving thread least.
"""

import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from schedtop.control.audit import AuditLog
from schedtop.control.bench_clients import Order, RoundTrips
from schedtop.control.messages import EngineInfo
from schedtop.control.server import ControlServer
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.loop import EngineLoop
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.step_model import StepModel

BLOCK_SIZE = 16
PROMPT = 16
BLOCKS_PER_REQUEST = 64
NUM_SETTLING = 5
"""Steps after a change of clients that aren't counted."""
NUM_COMMANDS = 5
"""Of each kind, per round."""

CONFIGURATIONS: dict[str, Order] = {
    "no client": Order(),
    "one at 10 Hz": Order(num_reading=1),
    "ten at 10 Hz": Order(num_reading=10),
    "one that never reads": Order(num_stalled=1),
    "no client again": Order(),
}
"""All in every round, each round beginning with the next. The first is what the others are compared with; with the last
it gives the spread of no client against itself."""
FIRST, AGAIN = "no client", "no client again"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine does meanwhile."""

    num_requests: int = 1000
    step_s: float = 0.010
    num_steps: int = 120
    """Per configuration and round."""


class Served(NamedTuple):
    """A running engine and what serves it."""

    core: "TimedCore"
    server: ControlServer
    path: Path


class StepTimes(msgspec.Struct, frozen=True):
    """Seconds of each step: from its end back to the end of the one before.

    `cpu`: of the engine thread alone; `serving`: of all other threads of its process, which is the control server.
    """

    wall: list[float] = []
    cpu: list[float] = []
    serving: list[float] = []


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Per configuration a `StepTimes` per round; round trips of commands, measured without other clients."""

    rounds: dict[str, list[StepTimes]]
    trips: RoundTrips


class TimedCore(EngineCore):
    """An engine that notes when its steps end."""

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        model = StepModel(base_s=step_s, per_sequence_s=0.0, per_prefill_token_s=0.0)
        super().__init__(config, SimulatedRunner(model))
        self.times = StepTimes()
        self._last = (0.0, 0.0, 0.0)
        self._num_wanted = 0
        self._is_enough = threading.Event()

    def step(self) -> EngineCoreOutputs | None:
        """As the engine's, with a note."""
        outputs = super().step()
        cpu = time.thread_time()
        now = (time.perf_counter(), cpu, time.process_time() - cpu)
        if self._num_wanted:
            self.times.wall.append(now[0] - self._last[0])
            self.times.cpu.append(now[1] - self._last[1])
            self.times.serving.append(now[2] - self._last[2])
            self._num_wanted -= 1
            if not self._num_wanted:
                self._is_enough.set()
        self._last = now
        return outputs

    def take_times(self, num_steps: int) -> StepTimes:
        """From another thread: the times of the next `num_steps` steps."""
        self.times = StepTimes([], [], [])
        self._is_enough.clear()
        self._num_wanted = num_steps
        self._is_enough.wait()
        return self.times


def measure(load: Load, num_rounds: int, progress: Callable[[int], None] = lambda _: None) -> Results:
    """Run all rounds. `progress` is told the number of each as it begins."""
    rounds: dict[str, list[StepTimes]] = {name: [] for name in CONFIGURATIONS}
    trips = RoundTrips()
    with (
        tempfile.TemporaryDirectory(prefix="schedtop-bench-") as folder,
        served(load, Path(folder)) as (core, _, path),
        ClientProcess(path) as clients,
    ):
        for number in range(num_rounds):
            progress(number)
            for name in _turned(list(CONFIGURATIONS), number):
                clients.obey(CONFIGURATIONS[name])
                core.take_times(NUM_SETTLING)
                rounds[name].append(core.take_times(load.num_steps))
            made = clients.obey(Order(num_commands=NUM_COMMANDS))
            trips.plain.extend(made.plain)
            trips.audited.extend(made.audited)
    return Results(rounds=rounds, trips=trips)


def _turned(names: list[str], number: int) -> list[str]:
    """Another one first each time, so that none always follows the same."""
    first = number % len(names)
    return names[first:] + names[:first]


@contextmanager
def served(load: Load, folder: Path) -> Iterator[Served]:
    """An engine with all its requests running, and the socket of its control server."""
    core = TimedCore(_sizes(load), load.step_s)
    engine, audit = EngineLoop(core), AuditLog(folder / "audit.sqlite")
    server = ControlServer(engine, _introduction(core), core.knob_table, audit)
    engine.start()
    try:
        server.start(folder / "e.sock")
        engine.submit(lambda core: _submit(core, load.num_requests), lambda call: None)
        core.take_times(NUM_SETTLING)
        yield Served(core, server, folder / "e.sock")
        server.stop()
    finally:
        engine.stop()
        core.shutdown()
        audit.close()


def _sizes(load: Load) -> EngineConfig:
    return EngineConfig(
        name="bench",
        block_size=BLOCK_SIZE,
        num_kv_blocks=load.num_requests * BLOCKS_PER_REQUEST + 1,
        max_model_len=1 << 20,
        max_num_batched_tokens=load.num_requests * PROMPT,
        max_num_seqs=load.num_requests,
    )


def _introduction(core: EngineCore) -> EngineInfo:
    config = core.config
    return EngineInfo(name=config.name, model="none", boot_id="bench", pid=0, version="")


def _submit(core: EngineCore, count: int) -> None:
    sampling = SamplingParams(max_tokens=1 << 19, ignore_eos=True)
    for number in range(count):
        core.add_request(f"request-{number}", [number % 100 + 1] * PROMPT, sampling)


class ClientProcess:
    """The clients, in a process of their own; a context manager."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-P", "-m", "schedtop.control.bench_clients", str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def obey(self, order: Order) -> RoundTrips:
        """Returns when the clients are as ordered."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=RoundTrips)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# ---- what it comes to ---------------------------------------------------------------------------------------------


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration: of each round its quantile, of these the median. Seconds; ratios to no client, 1.0 = as fast.

    So a disturbance that hits some rounds moves neither median nor p99.
    """

    median_s: float
    p99_s: float
    median_ratio: float
    p99_ratio: float
    cpu_median_s: float
    cpu_median_ratio: float
    cpu_p99_ratio: float
    serving_s: float
    """CPU time of the control server, mean per step."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All configurations. Spreads: the same figures of no client in half of the rounds, the largest to the smallest."""

    configurations: dict[str, Figures]
    median_spread: float
    p99_spread: float
    cpu_median_spread: float
    cpu_p99_spread: float
    step_s: float
    """Median without a client."""
    plain_trip_s: list[float]
    """Round trips of a snapshot without rows: median, p99 and longest."""
    audited_trip_s: list[float]
    """Of a knob change, whose row is on disk before the reply."""


def summarise(results: Results) -> Summary:
    """What the rounds come to."""
    base = _centre(results.rounds[FIRST])
    halves = [results.rounds[name][half::2] for name in (FIRST, AGAIN) for half in (0, 1)]
    groups = [_centre(rounds) for rounds in halves if rounds]
    return Summary(
        configurations={name: _figures(_centre(rounds), base) for name, rounds in results.rounds.items()},
        median_spread=_spread([group.wall_median for group in groups]),
        p99_spread=_spread([group.wall_p99 for group in groups]),
        cpu_median_spread=_spread([group.cpu_median for group in groups]),
        cpu_p99_spread=_spread([group.cpu_p99 for group in groups]),
        step_s=base.wall_median,
        plain_trip_s=[quantile(results.trips.plain, share) for share in (0.5, 0.99, 1.0)],
        audited_trip_s=[quantile(results.trips.audited, share) for share in (0.5, 0.99, 1.0)],
    )


class _Centre(NamedTuple):
    """The medians over rounds of each round's quantiles, in seconds; `serving`: of its means."""

    wall_median: float
    wall_p99: float
    cpu_median: float
    cpu_p99: float
    serving: float


def _centre(rounds: Sequence[StepTimes]) -> _Centre:
    return _Centre(
        wall_median=statistics.median(quantile(times.wall, 0.5) for times in rounds),
        wall_p99=statistics.median(quantile(times.wall, 0.99) for times in rounds),
        cpu_median=statistics.median(quantile(times.cpu, 0.5) for times in rounds),
        cpu_p99=statistics.median(quantile(times.cpu, 0.99) for times in rounds),
        serving=statistics.median(statistics.fmean(times.serving) for times in rounds),
    )


def _figures(here: _Centre, base: _Centre) -> Figures:
    return Figures(
        median_s=here.wall_median,
        p99_s=here.wall_p99,
        median_ratio=here.wall_median / base.wall_median,
        p99_ratio=here.wall_p99 / base.wall_p99,
        cpu_median_s=here.cpu_median,
        cpu_median_ratio=here.cpu_median / base.cpu_median,
        cpu_p99_ratio=here.cpu_p99 / base.cpu_p99,
        serving_s=here.serving,
    )


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of them that at least `share` of them don't exceed.

    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    >>> quantile(range(1, 201), 0.99)
    198
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
