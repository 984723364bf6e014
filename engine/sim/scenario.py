"""Scenario files: an engine, its step time, a load, and knob changes at times. TOML, strict, written by users.

Drawing is deterministic: the same file and seed give the same arrivals. Running a scenario is `simulate.py`'s.
"""

import difflib
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import Knobs, KnobValue, change_knobs, initial_knobs, knob_table
from schedtop.engine.profiles import PROFILES, Profile
from schedtop.engine.sim.simulate import Arrival, KnobsAt
from schedtop.engine.sim.step_model import StepModel


class BadScenario(SchedtopError):
    """A scenario file that can't be used; the message names the file and what is wrong in it."""

    code = "bad_scenario"


class Uniform(msgspec.Struct, frozen=True, tag_field="draw", tag="uniform", forbid_unknown_fields=True):
    """Whole numbers from `low` to `high`, each as likely."""

    low: int
    high: int


class Lognormal(msgspec.Struct, frozen=True, tag_field="draw", tag="lognormal", forbid_unknown_fields=True):
    """Long-tailed: `median`, with `sigma` of the logarithm, cut to 1 .. `most`."""

    median: float
    sigma: float
    most: int


Tokens = int | Uniform | Lognormal | list[int]
"""A number of tokens: fixed, drawn (`{draw = "uniform", low = 1, high = 9}`), or one of a list."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one class: `count` at `at_s`, or a Poisson process of `rate_per_s` from `at_s` to `until_s`."""

    name: str
    prompt: Tokens
    output: Tokens
    at_s: float = 0.0
    count: int = 0
    rate_per_s: float = 0.0
    until_s: float | None = None
    every_s: float = 0.0
    """Instead of a rate: one request each so many seconds."""
    priority: int = 0
    shared_prefix: int = 0
    """Leading prompt tokens that all requests of the class have in common."""
    abort_after_s: float | None = None
    abort_share: float = 0.0
    """Share of the requests whose client leaves `abort_after_s` after arrival."""


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Knobs turned at a time."""

    at_s: float
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
    horizon_s: float | None = None
    """Stop here; without it, when all requests have ended."""

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
        """All requests to come, in order of time, ties in the order of the file."""
        rng = random.Random(self.seed if seed is None else seed)
        arrivals = [
            arrival for index, load in enumerate(self.load) for arrival in _draw_load(load, index, rng, self.horizon_s)
        ]
        return sorted(arrivals, key=lambda arrival: arrival.at_s)


def load_scenario(source: str | Path) -> Scenario:
    """Read a scenario file, or a shipped one by its name. Raises `BadScenario`."""
    path = Path(source)
    if not path.suffix and not path.exists():
        return _shipped(str(source))
    try:
        return parse_scenario(path.read_bytes(), str(path))
    except OSError as error:
        raise BadScenario(f"{path}: {error.strerror}") from None


def parse_scenario(text: bytes, name: str) -> Scenario:
    """Decode a scenario; `name` is for the error message. Raises `BadScenario`."""
    try:
        scenario = msgspec.toml.decode(text, type=Scenario)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadScenario(f"{name}: {error}") from None
    scenario.start_knobs()
    return scenario


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


def _draw_load(load: Load, index: int, rng: random.Random, horizon_s: float | None) -> list[Arrival]:
    return [_draw_one(load, index, number, at_s, rng) for number, at_s in enumerate(_times(load, rng, horizon_s))]


def _times(load: Load, rng: random.Random, horizon_s: float | None) -> list[float]:
    times = [load.at_s] * load.count
    until = load.until_s if load.until_s is not None else horizon_s
    if load.rate_per_s or load.every_s:
        if until is None:
            raise BadScenario(f"load {load.name!r} has no end: give until_s, or the scenario a horizon_s")
        at = load.at_s if load.every_s else load.at_s + rng.expovariate(load.rate_per_s)
        while at < until:
            times.append(at)
            at += load.every_s or rng.expovariate(load.rate_per_s)
    return times


def _draw_one(load: Load, index: int, number: int, at_s: float, rng: random.Random) -> Arrival:
    num_prompt = max(1, draw_tokens(load.prompt, rng))
    num_shared = min(load.shared_prefix, num_prompt)
    shared = (index + 1) << 32  # stand-in tokens: equal exactly where prompts are to be equal
    own = shared + number + 1
    leaves = load.abort_after_s is not None and rng.random() < load.abort_share
    return Arrival(
        request_id=f"{load.name}{number}",
        at_s=at_s,
        token_ids=[shared] * num_shared + [own] * (num_prompt - num_shared),
        max_tokens=max(1, draw_tokens(load.output, rng)),
        priority=load.priority,
        load=load.name,
        abort_at_s=at_s + load.abort_after_s if leaves and load.abort_after_s is not None else None,
    )


def draw_tokens(tokens: Tokens, rng: random.Random) -> int:
    """One number of tokens."""
    match tokens:
        case Uniform():
            return rng.randint(tokens.low, tokens.high)
        case Lognormal():
            return min(tokens.most, max(1, round(tokens.median * rng.lognormvariate(0.0, tokens.sigma))))
        case list():
            return rng.choice(tokens)
        case _:
            return tokens
