"""Staging a knob: steps, typed values, what is out of range."""

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import KnobRefused
from schedtop.engine.knobs import Knobs, change_knobs, knob_table
from schedtop.tui import staging
from schedtop.tui.state import Ui

TABLE = knob_table(EngineConfig(num_kv_blocks=101, max_num_speculative_tokens=4))
BY_NAME = {spec.name: spec for spec in TABLE}


@pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)
def test_every_value_that_plus_and_minus_reach_is_one_the_engine_takes(spec) -> None:
    value = getattr(Knobs(), spec.name)
    for direction in [1] * 40 + [-1] * 60:
        value = staging.stepped(spec, value, direction)
        change_knobs(Knobs(), {spec.name: value}, TABLE)
        assert staging.problem(spec, value) == ""


def test_a_value_put_back_to_the_live_one_is_no_longer_staged() -> None:
    live = Knobs()
    ui = Ui(knob=1)
    ui = staging.turned(ui, TABLE, live, -1)
    assert ui.staged == {"max_num_seqs": 60}
    ui = staging.turned(ui, TABLE, live, 1)
    assert ui.staged == {}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_num_seqs", "12", 12),
        ("max_num_batched_tokens", "1_024", 1024),
        ("watermark", "0.05", 0.05),
        ("policy", "prio", "priority"),
        ("prefix_caching", "off", False),
    ],
)
def test_typed_values_are_read_as_people_write_them(name: str, text: str, value: object) -> None:
    assert staging.parsed(BY_NAME[name], text) == value


@pytest.mark.parametrize(
    ("name", "text"), [("max_num_seqs", "1.5"), ("watermark", "x"), ("policy", "lifo"), ("prefix_caching", "2")]
)
def test_a_value_that_cannot_be_read_is_refused_with_its_text(name: str, text: str) -> None:
    with pytest.raises(KnobRefused, match=f"{name}.*{text}"):
        staging.parsed(BY_NAME[name], text)


def test_a_typed_value_above_the_ceiling_is_staged_and_marked() -> None:
    ui = staging.entered(Ui(knob=1, entry="65"), TABLE, Knobs())
    assert ui.staged == {"max_num_seqs": 65}
    assert staging.problem(BY_NAME["max_num_seqs"], 65) == "above its ceiling 64"


def test_ranges_read_like_a_sentence() -> None:
    assert staging.range_text(BY_NAME["max_num_seqs"]) == "1 to 64 requests"
    assert staging.range_text(BY_NAME["policy"]) == "fcfs | priority"
    assert staging.range_text(BY_NAME["prefix_caching"]) == "on | off"
