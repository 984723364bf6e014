"""The operator's commands against a real engine: what they print, what they refuse, what programs get."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from schedtop.cli.main import cli
from schedtop.control.client import Client
from schedtop.control.messages import GetSnapshot, Pause, SetKnobs


class Shell:
    """Runs `schedtop ...` against one engine."""

    def __init__(self, path):
        self._environment = {"SCHEDTOP_CONNECT": str(path), "NO_COLOR": "1"}

    def run(self, *arguments, status=0):
        result = CliRunner().invoke(cli, list(arguments), env=self._environment)
        assert result.exit_code == status, result.output
        return result.output

    def json(self, *arguments):
        return json.loads(self.run(*arguments, "--json"))


@pytest.fixture
def engine(serve, brisk_runner):
    return serve(brisk_runner, num_kv_blocks=2000)


@pytest.fixture
def shell(engine):
    return Shell(engine.path)


@pytest.fixture
def with_requests(engine, make_request):
    """A frozen engine in which requests wait; their owner's connection lives as long as the test."""
    loop = asyncio.new_event_loop()

    async def submit(*names, **fields):
        client = await Client.connect(str(engine.path), name="owner")
        await client.request(Pause(mode="keep"))
        for name in names:
            await client.request(make_request(name, 32, 2000, **fields))
        return client

    clients = []
    yield lambda *names, **fields: clients.append(loop.run_until_complete(submit(*names, **fields)))
    for client in clients:
        loop.run_until_complete(client.close())
    loop.close()


def test_knobs_are_shown_with_value_range_and_meaning(shell):
    text = shell.run("knobs")
    (line,) = (line for line in text.splitlines() if line.startswith("max_num_seqs "))
    assert "8" in line and "1 to 8" in line and "Cap on running requests" in line
    assert shell.run("knobs", "list") == text
    listed = shell.json("knobs")
    assert listed["generation"] == 0
    assert {"max_num_seqs": 8}.items() <= {knob["name"]: knob["value"] for knob in listed["knobs"]}.items()


def test_setting_a_knob_prints_what_it_was_what_it_is_and_the_step(shell):
    text = shell.run("knobs", "set", "max_num_seqs=4", "prefix_caching=false", "--reason", "trial")
    assert "max_num_seqs: 8 -> 4" in text
    assert "prefix_caching: true -> false" in text
    assert "(change 1, generation 1)" in text
    assert "nothing to do" in shell.run("knobs", "set", "max_num_seqs=4")


def test_a_dry_run_says_that_it_is_one(shell):
    text = shell.run("knobs", "set", "max_num_seqs=4", "--dry-run")
    assert "max_num_seqs: 8 -> 4" in text and "dry run: nothing was changed" in text
    assert shell.json("knobs")["generation"] == 0


def test_a_refused_value_is_one_line_and_exit_status_1(shell):
    text = shell.run("knobs", "set", "max_num_seqs=9", status=1)
    assert text.startswith("schedtop: error: max_num_seqs=9 is above its ceiling 8")
    assert text.count("\n") == 1


@pytest.mark.parametrize("bad", ["max_num_seqs", "=4", "max_num_seqs="])
def test_what_is_no_assignment_is_a_usage_error(shell, bad):
    assert "is not NAME=VALUE" in shell.run("knobs", "set", bad, status=2)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("1h", 3600.0)])
def test_a_trial_change_tells_when_it_ends_and_can_be_confirmed(shell, text, seconds):
    said = shell.run("knobs", "set", "max_num_seqs=4", "--for", text)
    assert f"rolls back by itself in {seconds:g} s unless confirmed" in said
    assert "kept change 1" in shell.run("knobs", "confirm")
    assert "no change waits for confirmation" in shell.run("knobs", "confirm", status=1)
    for nothing in (["max_num_seqs=4"], ["max_num_seqs=5", "--dry-run"]):
        assert "rolls back" not in shell.run("knobs", "set", *nothing, "--for", text)


def test_a_duration_that_is_none_is_a_usage_error(shell):
    assert "is no duration" in shell.run("knobs", "set", "max_num_seqs=4", "--for", "soon", status=2)


def test_undo_puts_back_the_last_change(shell):
    shell.run("knobs", "set", "max_num_seqs=4")
    assert "max_num_seqs: 4 -> 8" in shell.run("knobs", "undo")
    assert "nothing to undo" in shell.run("knobs", "undo", status=1)


def test_a_stale_generation_is_refused(shell):
    shell.run("knobs", "set", "max_num_seqs=4")
    text = shell.run("knobs", "set", "max_num_seqs=5", "--expect-generation", "0", status=1)
    assert "max_num_seqs 8 -> 4" in text


def test_requests_are_listed_with_the_reason_they_wait(shell, with_requests):
    with_requests("r1", "r2", priority=3)
    text = shell.run("requests")
    assert "r1" in text and "paused" in text
    assert "0 running, 2 waiting" in text
    listed = shell.json("requests")
    assert [row["request_id"] for row in listed["waiting"]] == ["r1", "r2"]
    assert "(1 not shown)" in shell.run("requests", "--limit", "1")
    assert "r2" not in shell.run("requests", "--contains", "!r2")


def test_ids_from_clients_cannot_steer_the_terminal(shell, with_requests):
    with_requests("evil\x1b[2Jid")
    assert "\x1b" not in shell.run("requests")
    assert "evil?[2Jid" in shell.run("requests")


def test_operations_on_requests_tell_what_they_found_and_did(shell, with_requests):
    with_requests("r1", "r2", "r3")
    assert "2 given priority -5" in shell.run("requests", "priority", "r1", "r2", "--to", "-5")
    assert "1 held" in shell.run("requests", "hold", "r1")
    assert "1 released" in shell.run("requests", "release", "--id-prefix", "r1")
    assert "nothing: none had to be preempted" in shell.run("requests", "preempt", "r1")
    assert "3 given max_tokens 7" in shell.run("requests", "max-tokens", "--id-prefix", "r", "--to", "7")
    text = shell.run("requests", "abort", "--priority-at-most", "-5", "--reason", "cleanup")
    assert "found: 2 waiting" in text and "2 aborted" in text
    assert "not live: gone" in shell.run("requests", "abort", "gone")


def test_which_way_priorities_go_is_said_where_they_are_given(shell):
    for command in (["requests"], ["requests", "priority"]):
        assert "lower" in shell.run(*command, "--help")
    text = shell.run("requests", "priority", "r1", "--to", str(2**31), status=1)
    assert "is outside -2147483648 to 2147483647 (lower runs first)" in text
    assert "not a valid integer" in shell.run("requests", "priority", "r1", "--to", "high", status=2)


def test_without_a_selection_no_request_is_touched(shell):
    for command in (["abort"], ["hold"], ["priority", "--to", "1"]):
        assert "say which requests" in shell.run("requests", *command, status=2)


def test_pause_resume_and_drain(shell, with_requests):
    assert "done: paused: frozen" in shell.run("pause")
    assert "found: paused: frozen" in shell.run("pause", "--mode", "wait")
    assert shell.json("resume")["found"] == "paused: admitting nobody new"
    told = shell.run("drain", "--limit", "5s")
    assert "drained: nothing is under way; nobody new is admitted until resume" in told


def test_a_drain_that_leaves_something_exits_with_1(shell, engine, with_requests):
    with_requests("r1")
    shell.run("resume")
    while shell.json("requests")["running"] == []:
        pass
    assert "1 left: the limit of 0.05 s has passed" in shell.run("drain", "--limit", "50ms", status=1)


def test_cache_and_self_check(shell):
    assert "forgot them all" in shell.run("reset-cache")
    assert "accounting is sound" in shell.run("self-check")


def test_the_last_steps_are_shown_the_newest_last(shell, engine, with_requests):
    assert shell.run("steps") == "no step has ended yet\n"
    with_requests("r1", "r2")
    shell.run("resume")
    while len(shell.json("steps", "--last", "4096")) < 5:
        pass
    shell.run("pause")
    lines = shell.run("steps", "--last", "3").splitlines()
    assert lines[0].split()[:4] == ["step", "at", "ms", "forward"]
    told = shell.json("steps", "--last", "3")
    assert [int(line.split()[0]) for line in lines[1:]] == [record["step"] for record in told]
    assert told[-1]["num_running"] == 2
    assert "0 is not in the range" in shell.run("steps", "--last", "0", status=2)


def test_the_audit_log_is_told_oldest_first_and_can_be_read_without_an_engine(shell, engine):
    shell.run("knobs", "set", "max_num_seqs=4", "--reason", "trial")
    shell.run("knobs", "set", "max_num_seqs=99", status=1)
    first, second = shell.run("audit").splitlines()
    assert "cli (uid" in first and "SetKnobs done [change 1]  max_num_seqs 8 -> 4" in first
    assert 'reason: "trial"' in first
    assert "SetKnobs refused" in second and "above its ceiling 8" in second
    assert shell.run("audit", "--file", str(engine.audit.path)) == shell.run("audit")
    assert [row["id"] for row in shell.json("audit", "--limit", "1")] == [2]
    assert "there is no audit log" in shell.run("audit", "--file", "/nonexistent", status=1)


def test_options_before_a_subcommand_are_pointed_to_their_place(shell):
    assert "put the options after 'set'" in shell.run("knobs", "--json", "set", "max_num_seqs=4", status=2)
    assert "put the options after 'abort'" in shell.run("requests", "--json", "abort", "x", status=2)


def test_an_engine_that_is_gone_is_one_line(shell, folder):
    text = shell.run("knobs", "--connect", str(folder / "gone.sock"), status=1)
    assert text.startswith("schedtop: error: no engine answers on") and "is it running?" in text


async def test_a_client_is_named_in_the_rows_it_causes(engine):
    async with await Client.connect(str(engine.path), name="tui") as client:
        await client.request(SetKnobs(changes={"max_num_seqs": 4}))
        await client.request(GetSnapshot())
    from schedtop.control.audit import read_audit_file

    assert read_audit_file(engine.audit.path, 1)[0]["client"] == "tui"
