"""Scenario files: every way in which requests can come, what they share and when they leave; and clear errors."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedtop.cli.sim import import_trace
from schedtop.cli.sim import run as run_command
from schedtop.engine.errors import SchedtopError
from schedtop.engine.sim.scenario import BadScenario, Scenario, load_scenario, parse_scenario, shipped_scenarios
from schedtop.engine.sim.simulate import SimulationResult
from schedtop.engine.sim.trace import BadTrace, read_trace
from schedtop.engine.snapshot import FinishReason

HEAD = """
name = "mine"
description = "of a test"
horizon_s = 30
[engine]
num_kv_blocks = 2000
[step_time]
base_ms = 5
per_prefill_token_ms = 0.02
[[load]]
name = "a"
"""


def scenario(load: str, head: str = HEAD) -> Scenario:
    """A scenario with one load."""
    return parse_scenario((head + load).encode(), "mine.toml")


def run(loaded: Scenario, seed: int | None = None) -> SimulationResult:
    """Run it to its end."""
    return loaded.simulation(seed=seed).run(loaded.horizon_s)


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_serve_requests_of_every_load(name: str) -> None:
    loaded = load_scenario(name)
    result = loaded.simulation().run(min(loaded.horizon_s or 25.0, 25.0))
    begun = {load.name for load in loaded.load if load.at_s < 15}
    answered = {outcome.arrival.load for outcome in result.outcomes.values() if outcome.token_times}
    assert begun <= answered


def test_there_are_a_dozen_operator_situations_beside_the_two_of_the_tables() -> None:
    assert len([name for name in shipped_scenarios() if not name.startswith("paper-")]) >= 12


def test_a_poisson_load_has_its_rate_and_no_beat() -> None:
    times = [a.at_s for a in scenario("rate_per_s = 40\nprompt = 5\noutput = 2").arrivals(3)]
    assert 1000 < len(times) < 1400
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert 0.8 < (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean < 1.2


def test_bursts_come_on_the_beat_and_together() -> None:
    arrivals = scenario("at_s = 2\nevery_s = 10\nburst = 7\nprompt = 5\noutput = 2").arrivals()
    assert Counter(arrival.at_s for arrival in arrivals) == {2.0: 7, 12.0: 7, 22.0: 7}


@pytest.mark.parametrize(("clients", "think_s"), [(1, 0.0), (5, 0.0), (6, 0.7)])
def test_a_closed_loop_never_has_more_requests_under_way_than_clients(clients: int, think_s: float) -> None:
    loaded = scenario(f"clients = {clients}\nthink_s = {think_s}\nprompt = 30\noutput = [5, 40]")
    result = run(loaded, seed=clients)
    moments = []
    for outcome in result.outcomes.values():
        if outcome.token_times:
            end = outcome.token_times[-1] if outcome.finish_reason else float("inf")
            moments += [(outcome.arrival.at_s, 1), (end, -1)]
    under_way = most = 0
    for _, change in sorted(moments):  # an end before the arrival that it brings
        under_way += change
        most = max(most, under_way)
    assert most == clients or (think_s and 1 < most <= clients)
    assert len(result.outcomes) > 20 * clients


def test_a_closed_loop_answers_faster_engines_with_more_load_and_sends_the_same_requests() -> None:
    text = "clients = 4\nprompt = { draw = 'uniform', low = 10, high = 90 }\noutput = [5, 40]"
    slow, fast = run(scenario(text)), run(scenario(text, HEAD.replace("base_ms = 5", "base_ms = 1")))
    assert len(fast.outcomes) > 3 * len(slow.outcomes)
    for name, outcome in slow.outcomes.items():
        assert len(outcome.arrival.token_ids) == len(fast.outcomes[name].arrival.token_ids)


def test_a_client_that_is_refused_tries_again_later() -> None:
    loaded = scenario(
        "clients = 3\nprompt = 30\noutput = 200", HEAD + 'count = 1\nprompt = 10\noutput = 5\n[[load]]\nname = "b"\n'
    )
    simulation = loaded.simulation({"max_num_seqs": 1, "max_num_queued_reqs": 1})
    result = simulation.run(loaded.horizon_s)
    assert result.num_refused > 5
    assert sum(outcome.finish_reason is not None for outcome in result.outcomes.values()) > 5


def test_an_answer_may_end_before_what_was_asked_for() -> None:
    loaded = scenario("count = 4\nprompt = 10\noutput = 7\nmax_tokens = 300")
    outcomes = run(loaded).outcomes.values()
    assert {len(outcome.token_times) for outcome in outcomes} == {7}
    assert {outcome.finish_reason for outcome in outcomes} == {FinishReason.STOP}
    reserved = loaded.simulation({"reserve_output": True, "kv_block_limit": 40})
    reserved.run(0.01)
    assert len(reserved.core.scheduler.running) == 2, "what is asked for is what is reserved: 20 blocks each"


def test_groups_share_a_prefix_and_different_groups_do_not() -> None:
    loaded = scenario("count = 6\nprompt = 100\noutput = 2\nshared_prefix = 64\nprefix_groups = 2")
    prefixes = [tuple(arrival.token_ids[:64]) for arrival in loaded.arrivals()]
    assert len(set(prefixes)) == 2 and prefixes[0] == prefixes[2]
    assert len({tuple(arrival.token_ids[64:]) for arrival in loaded.arrivals()}) == 6


def test_clients_leave_and_priorities_and_knob_changes_take_effect() -> None:
    text = """count = 30\nprompt = 10\noutput = 2000\nabort_after_s = 1.5\nabort_share = 0.5\npriority = 3
[[change]]\nat_s = 3.0\nset = { max_num_seqs = 2 }"""
    simulation = scenario(text).simulation()
    result = simulation.run(4.0)
    assert simulation.core.scheduler.knobs.max_num_seqs == 2
    left = [o for o in result.outcomes.values() if o.finish_reason is FinishReason.ABORT]
    assert 5 < len(left) < 25 and all(outcome.token_times[-1] <= 1.52 for outcome in left)
    assert {request.priority for request in simulation.core.scheduler.running} == {3}


def test_with_request_level_batching_a_batch_enters_when_the_last_one_has_ended() -> None:
    text = "count = 6\nprompt = 10\noutput = [3, 50]"
    loaded = scenario(text, 'batching = "request"' + HEAD)
    simulation = loaded.simulation({"max_num_seqs": 2}, seed=4)
    result = simulation.run()
    batches = sorted(
        (min(o.token_times[0] for o in pair), max(o.token_times[-1] for o in pair))
        for pair in zip(*[iter(sorted(result.outcomes.values(), key=lambda o: o.token_times[0]))] * 2, strict=True)
    )
    assert all(earlier[1] < later[0] for earlier, later in pairwise(batches))


def test_the_same_seed_draws_the_same_load_and_another_seed_another() -> None:
    loaded = scenario(
        "rate_per_s = 5\nprompt = { draw = 'lognormal', median = 50, sigma = 1, most = 900 }\noutput = [1, 2, 3]"
    )

    def draw(seed: int) -> list[tuple[float, int]]:
        return [(arrival.at_s, len(arrival.token_ids)) for arrival in loaded.arrivals(seed)]

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("prompt = 5\noutput = 5", "must name one of count, rate_per_s, every_s, clients, trace; it names none"),
        ("rate_per_s = 1\nclients = 2\nprompt = 5\noutput = 5", "it names rate_per_s and clients"),
        ("count = 1\noutput = 5", "needs prompt and output"),
        ("rate_per_s = -1\nprompt = 5\noutput = 5", ">= 0.*rate_per_s"),
        ("count = 1\nprompt = 0\noutput = 5", ">= 1.*prompt"),
        ("count = 1\nprompt = { draw = 'uniform', low = 9, high = 3 }\noutput = 5", "low=9 is above high=3"),
        ("count = 1\nprompt = []\noutput = 5", "length >= 1"),
        ("count = 1\nprompt = 5\noutput = 5\nabort_share = 2", "<= 1"),
        ("count = 1\nprompts = 5\noutput = 5", "unknown field `prompts`"),
        ("count = 1\nprompt = 5\noutput = 5\n[[change]]\nat_s = 1\nset = { max_num_sequences = 3 }", "max_num_seqs"),
    ],
)  # fmt: skip
def test_a_load_that_makes_no_sense_is_refused_by_name(load: str, said: str) -> None:
    with pytest.raises(SchedtopError, match=said):
        scenario(load)


def test_an_endless_load_needs_an_end() -> None:
    with pytest.raises(BadScenario, match="has no end: give until_s, or the scenario a horizon_s"):
        scenario("clients = 1\nprompt = 5\noutput = 5", HEAD.replace("horizon_s = 30", ""))


# ---- traces -----------------------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670,879,55
"""
AZURE_WITH_ZONE = AZURE.replace("0900,", "09+00:00,").replace("1690,", "169+00:00,").replace("5670,", "567+00:00,")
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
119.5,GPT-4,12,9,21,API log
"""


def trace(folder: Path, text: str) -> Path:
    """A file with this text."""
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", [AZURE, AZURE_WITH_ZONE, "\ufeff" + AZURE])
def test_an_azure_trace_is_read(tmp_path: Path, text: str) -> None:
    rows = read_trace(trace(tmp_path, text)).rows
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in rows] == [(374, 44), (396, 109), (879, 55)]
    assert [row.at_s for row in rows] == pytest.approx([0.0, 4.314579, 4.541977], abs=1e-5)


def test_a_burst_gpt_trace_is_read_and_its_failed_requests_are_counted(tmp_path: Path) -> None:
    read = read_trace(trace(tmp_path, BURST_GPT))
    assert [(row.at_s, row.num_prompt_tokens, row.num_output_tokens) for row in read.rows] == [
        (0.0, 472, 18), (40.0, 1087, 230), (114.5, 12, 9),
    ]  # fmt: skip
    assert read.num_left_out == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("when,prompt_tokens,output_tokens\n", "line 1: no column for arrival among 'when'.*call it one of timestamp"),
        ("timestamp,prompt_tokens,output_tokens\n", "no request with an answer"),
        ("timestamp,prompt_tokens,output_tokens\n1,2,3\n4,5\n", "line 3: 2 cells, the first line names 3"),
        ("timestamp,prompt_tokens,output_tokens\n1,2,3\n\n4,x,5\n", "line 4: prompt_tokens='x' is no number of tokens"),
        ("timestamp,prompt_tokens,output_tokens\n1,0,3\n", "line 2: prompt_tokens='0'.*give 1 to"),
        ("timestamp,prompt_tokens,output_tokens\n1,5,-3\n", "line 2: output_tokens='-3'.*give 0 to"),
        ("timestamp,prompt_tokens,output_tokens\n1,nan,3\n", "prompt_tokens='nan'"),
        ("timestamp,prompt_tokens,output_tokens\nsoon,5,3\n", "line 2: timestamp='soon' is neither seconds"),
        ("timestamp,prompt_tokens,output_tokens\n-1,5,3\n", "timestamp='-1' is neither seconds"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_is_refused_by_line_and_value(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadTrace, match=said):
        read_trace(trace(tmp_path, text))


def test_a_scenario_plays_a_trace_that_lies_beside_it_faster_and_in_part(tmp_path: Path) -> None:
    trace(tmp_path, BURST_GPT)
    head = HEAD.replace("horizon_s = 30", "")
    (tmp_path / "mine.toml").write_text(head + 'trace = "trace.csv"\nspeed = 10\nlimit = 2\nat_s = 1.0')
    loaded = load_scenario(tmp_path / "mine.toml")
    assert [arrival.at_s for arrival in loaded.arrivals()] == [1.0, 5.0]
    assert sorted(len(outcome.token_times) for outcome in run(loaded).outcomes.values()) == [18, 230]


def test_a_trace_that_is_missing_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(HEAD + 'trace = "none.csv"')
    with pytest.raises(BadTrace, match=r"none\.csv: No such file"):
        load_scenario(tmp_path / "mine.toml").arrivals()


def test_a_trace_becomes_a_scenario_that_runs(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    source = trace(tmp_path / "traces", BURST_GPT)
    target = tmp_path / "mine.toml"
    made = CliRunner().invoke(import_trace, [str(source), "--output", str(target), "--speed", "20"])
    assert made.exit_code == 0 and "3 requests over 6 s (1 without an answer left out)" in made.output
    shown = CliRunner().invoke(run_command, [str(target)])
    assert shown.exit_code == 0 and "times real time" in shown.output and "trace" in shown.output
    again = CliRunner().invoke(import_trace, [str(source), "--output", str(target)])
    assert "exists already" in str(again.exception)
