"""Scenario files: an engine, its step time, a load, and knob changes at times. TOML, strict, written by users.

Drawing is deterministic: the same file and seed give the same arrivals. Running a scenario is `simulate.py`'s.
"""

import difflib
import os
import random
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import Knobs, KnobValue, change_knobs, initial_knobs, knob_table
from schedtop.engine.profiles import PROFILES, Profile
from schedtop.engine.sim.load import Load, Seconds, arrivals_of, has_end
from schedtop.engine.sim.simulate import Arrival, KnobsAt, Simulation, Watch
from schedtop.engine.sim.step_model import StepModel
from schedtop.engine.sim.trace import Trace


class BadScenario(SchedtopError):
    """A scenario file that can't be used; the message names the file and what is wrong in it."""

    code = "bad_scenario"


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Knobs turned at a time."""

    at_s: Seconds
    set: dict[str, KnobValue]


class StepTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step-time model in milliseconds."""

    base_ms: float
    per_sequence_ms: float = 0.0
    per_prefill_token_ms: float = 0.0
    per_context_token_ms: float = 0.0

    def model(self) -> StepModel:
        """The same in seconds."""
        return StepModel(
            base_s=self.base_ms / 1e3,
            per_sequence_s=self.per_sequence_ms / 1e3,
            per_prefill_token_s=self.per_prefill_token_ms / 1e3,
            per_context_token_s=self.per_context_token_ms / 1e3,
        )


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    name: str
    description: str
    step_time: StepTime
    load: list[Load]
    profile: str = "vllm"
    """Which of `engine.profiles` the settings below start from."""
    engine: dict[str, Any] = {}
    """Fields of `EngineConfig`; `max_model_len = 0` means no limit."""
    knobs: dict[str, KnobValue] = {}
    change: list[Change] = []
    seed: int = 0
    horizon_s: Annotated[float, Meta(gt=0)] | None = None
    """Stop here; without it, when all requests have ended."""
    batching: Literal["iteration", "request"] = "iteration"
    """`request`: as servers did before iteration-level scheduling, the next batch of at most `max_num_seqs` requests
    enters when the whole last one has ended. The scheduler is the same; the simulation hands the requests in so.
    Padding of the shorter ones, which such servers computed as well, is not charged."""

    def __post_init__(self) -> None:
        for load in self.load:
            if not has_end(load, self.horizon_s):
                raise ValueError(f"load {load.name!r} has no end: give until_s, or the scenario a horizon_s")

    def config(self) -> EngineConfig:
        """The engine's sizes. Raises `BadScenario`."""
        fields = {**self._profile().config, **self.engine}
        if fields.get("max_model_len") == 0:
            fields["max_model_len"] = None
        try:
            return msgspec.convert(fields, EngineConfig)
        except msgspec.ValidationError as error:
            raise BadScenario(f"scenario {self.name!r}, [engine]: {error}{_nearest(fields)}") from None

    def start_knobs(self, overrides: dict[str, KnobValue] | None = None) -> Knobs:
        """The live settings at the start. Raises `KnobRefused`."""
        config = self.config()
        return change_knobs(
            initial_knobs(config), {**self._profile().knobs, **self.knobs, **(overrides or {})}, knob_table(config)
        )

    def _profile(self) -> Profile:
        if self.profile not in PROFILES:
            raise BadScenario(f"scenario {self.name!r}: no profile {self.profile!r}; there are {', '.join(PROFILES)}")
        return PROFILES[self.profile]

    def knob_changes(self) -> list[KnobsAt]:
        """Changes in order of time."""
        return [KnobsAt(change.at_s, change.set) for change in sorted(self.change, key=lambda change: change.at_s)]

    def arrivals(self, seed: int | None = None) -> list[Arrival]:
        """All requests to come, in order of time, ties in the order of the file; of closed loops the first ones.

        Raises `BadTrace`.
        """
        rng = random.Random(self.seed if seed is None else seed)
        arrivals = [
            arrival for index, load in enumerate(self.load) for arrival in arrivals_of(load, index, rng, self.horizon_s)
        ]
        return sorted(arrivals, key=lambda arrival: arrival.at_s)

    def simulation(
        self, overrides: dict[str, KnobValue] | None = None, seed: int | None = None, watch: Watch | None = None
    ) -> Simulation:
        """Everything set up; `run(self.horizon_s)` runs it. Raises as the parts do."""
        return Simulation(
            self.config(),
            self.start_knobs(overrides),
            self.step_time.model(),
            self.arrivals(seed),
            self.knob_changes(),
            watch,
            is_request_level=self.batching == "request",
        )


def load_scenario(source: str | Path) -> Scenario:
    """Read a scenario file, or a shipped one by its name. Raises `BadScenario`."""
    path = Path(source)
    if not path.suffix and not path.exists():
        return _shipped(str(source))
    try:
        return _with_traces_beside(parse_scenario(path.read_bytes(), str(path)), path.parent)
    except OSError as error:
        raise BadScenario(f"{path}: {error.strerror}") from None


def parse_scenario(text: bytes, name: str) -> Scenario:
    """Decode a scenario; `name` is for the error message. Raises `BadScenario`, or `KnobRefused` for a bad knob."""
    try:
        scenario = msgspec.toml.decode(text, type=Scenario)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadScenario(f"{name}: {error}") from None
    knobs, table = scenario.start_knobs(), knob_table(scenario.config())
    for change in scenario.change:
        change_knobs(knobs, change.set, table)
    return scenario


def _with_traces_beside(scenario: Scenario, folder: Path) -> Scenario:
    loads = [replace(load, trace=str(folder / load.trace)) if load.trace else load for load in scenario.load]
    return replace(scenario, load=loads)


def trace_scenario(trace: Path, target: Path, read: Trace, speed: float, limit: int | None) -> str:
    """The text of a scenario that plays a trace on a plain engine; `target` is where it will stand."""
    longest = max(row.num_prompt_tokens + row.num_output_tokens for row in read.rows)
    played = os.path.relpath(trace.absolute(), target.absolute().parent)
    lines = [
        f"name = {_quoted(target.stem)}",
        f"description = {_quoted(f'{len(read.rows)} requests of the trace {trace.name}')}",
        "\n[engine]\nnum_kv_blocks = 8000",
        f"max_model_len = {max(4096, longest + 1)}",
        "max_num_batched_tokens = 8192\nmax_num_seqs = 256",
        "\n[knobs]\nmax_num_batched_tokens = 2048",
        "\n[step_time]\nbase_ms = 8\nper_sequence_ms = 0.06\nper_prefill_token_ms = 0.02",
        f'\n[[load]]\nname = "trace"\ntrace = {_quoted(played)}\nspeed = {speed:g}',
    ]
    return "\n".join([*lines, *([f"limit = {limit}"] if limit else []), ""])


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a JSON string is a TOML string


def shipped_scenarios() -> list[str]:
    """Names of the scenarios that come with the package."""
    folder = files("schedtop.engine.sim") / "scenarios"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _shipped(name: str) -> Scenario:
    if name not in shipped_scenarios():
        close = difflib.get_close_matches(name, shipped_scenarios(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise BadScenario(f"no scenario is called {name!r}{hint} (shipped: {', '.join(shipped_scenarios())})")
    return parse_scenario((files("schedtop.engine.sim") / "scenarios" / f"{name}.toml").read_bytes(), name)


def _nearest(fields: dict[str, Any]) -> str:
    known = EngineConfig.__struct_fields__
    for field in fields:
        if field not in known and (close := difflib.get_close_matches(field, known, n=1)):
            return f"; did you mean {close[0]!r} instead of {field!r}?"
    return ""
