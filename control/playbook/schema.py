"""What a playbook file may say, as types. The JSON Schema for editors is generated from them.

Reading a file is `reader.py`'s, doing what it says `runner.py`'s.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import KNOB_NAMES, KnobSpec, KnobValue, knob_table

MAX_ERRORS = 3
ACTIONS = ("set", "sweep", "wait", "pause", "resume", "drain")
"""What a step can do; each does exactly one."""
PAUSE_MODES = ("abort", "wait", "keep")
OUTCOMES = ("rollback", "hold", "ignore")
"""What may be done about a check that doesn't pass."""

Duration = Annotated[
    str,
    Meta(
        description="A number and ms, s, m or h.",
        examples=["500ms", "10s", "2m"],
        extra_json_schema={"pattern": r"^\s*[0-9.]+\s*(ms|s|m|h)\s*$"},
    ),
]
Expression = Annotated[
    str,
    Meta(
        description="Comparisons of signals, with and, or, not; `over 10s`: a window, `for 5s`: has held so long.",
        examples=["itl_p99_ms > 80 for 5s and running >= 4", "ttft_p95_ms < 2s over 30s"],
    ),
]
Outcome = Annotated[str, Meta(extra_json_schema={"enum": list(OUTCOMES)})]


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits for a computed value."""

    min: float | None = None
    max: float | None = None


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Try values of one knob on the live load and leave the best one that keeps the condition."""

    knob: Annotated[str, Meta(description="The knob to try.", extra_json_schema={"enum": list(KNOB_NAMES)})]
    values: Annotated[list[KnobValue], Meta(description="What to try, in this order.", examples=[["ceiling / 4", 512]])]
    keep: Annotated[str, Meta(description="What a value must keep to be chosen: a condition without windows.")]
    best: Annotated[str, Meta(description="`lowest SIGNAL` or `highest SIGNAL`.", examples=["lowest ttft_p95_ms"])]
    settle: Duration = "2s"
    measure: Duration = "10s"
    min_samples: Annotated[int, Meta(description="Fewer samples of a signal than this are no data.")] = 20


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to do: exactly one of `set`, `sweep`, `wait`, `pause`, `resume`, `drain`."""

    set: Annotated[dict[str, KnobValue] | None, Meta(description="Knobs to set, all or none.")] = None
    within: Annotated[Bounds, Meta(description="Bounds of a computed value.")] = Bounds()
    sweep: Sweep | None = None
    wait: Duration | None = None
    pause: Annotated[
        str | None,
        Meta(
            description="abort: end everything; wait: let running requests end; keep: freeze.",
            extra_json_schema={"enum": list(PAUSE_MODES)},
        ),
    ] = None
    resume: Annotated[bool | None, Meta(description="Go on after a pause or a drain: `true`.")] = None
    drain: Annotated[Duration | None, Meta(description="Admit nobody new; at most so long.")] = None
    when: Annotated[Expression | None, Meta(description="Pass the step over unless so; in `finally`: wait for it.")] = (
        None
    )


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold afterwards, and what to do if it doesn't or if nobody knows."""

    expect: Expression
    min_samples: Annotated[int, Meta(description="Fewer samples than this are no data.")] = 1
    on_fail: Outcome = "rollback"
    on_no_data: Outcome = "hold"
    max_errors: Annotated[int, Meta(description="So many failed readings in a row count as a failed check.")] = (
        MAX_ERRORS
    )


class Playbook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"last": "finally"}):
    """A whole file."""

    name: Annotated[str, Meta(description="Letters, digits, dots, dashes: it goes into the audit log.")]
    steps: Annotated[list[Step], Meta(description="What to do, in this order.")]
    description: str = ""
    when: Annotated[Expression | None, Meta(description="Wait for this; run again after the cooldown.")] = None
    schedule: Annotated[
        str | None,
        Meta(description="Hours in which it may begin.", examples=["22:00-06:00", "mon-fri 08:00-18:30"]),
    ] = None
    timezone: Annotated[str, Meta(description="Of the schedule; this machine's by default.")] = ""
    cooldown: Duration = "30s"
    checks: Annotated[list[Check], Meta(description="Judged on what happens after the last step.")] = []
    last: Annotated[list[Step], Meta(description="Done after the checks have passed, or when the hours end.")] = []


def json_schema() -> dict[str, Any]:
    """JSON Schema of a playbook file, for editors: the knobs with their types and what they do."""
    (_,), components = msgspec.json.schema_components([Playbook], ref_template="#/$defs/{name}")
    components["Step"]["properties"]["set"] = {
        "description": "Knobs to set, all or none.",
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {spec.name: _knob_schema(spec) for spec in knob_table(EngineConfig())},
    }
    components["Step"]["oneOf"] = [{"required": [action]} for action in ACTIONS]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "schedtop playbook",
        "$ref": "#/$defs/Playbook",
        "$defs": components,
    }


def _knob_schema(spec: KnobSpec) -> dict[str, Any]:
    """Upper ends are left out where they are an engine's own ceiling."""
    text = f"{spec.summary} ({spec.unit})" if spec.unit else spec.summary
    if spec.kind == "bool":
        return {"description": text, "enum": [True, False, "initial"]}
    if spec.kind == "choice":
        return {"description": text, "enum": [*spec.choices, "initial"]}
    number = {"type": "integer" if spec.kind == "int" else "number"}
    formula = {"type": "string", "examples": ["initial", "ceiling / 2", "running * 0.75", "budget_for(80ms)"]}
    low = {"minimum": spec.low} if spec.low is not None else {}
    return {"description": text, "anyOf": [{**number, **low}, formula]}
