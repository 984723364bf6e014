"""The audit log: private, durable, complete."""

import contextlib
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from typing import get_args

import pytest

from schedtop.control.audit import Actor, AuditFailed, AuditLog, AuditRow, read_audit_file
from schedtop.control.errors import CommandRefused
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AddRequest,
    AnyCommand,
    ConfirmChange,
    Drain,
    DumpSteps,
    EndLease,
    GetAudit,
    GetInfo,
    GetSnapshot,
    GetState,
    GetStepModel,
    HoldLease,
    HoldRequests,
    NoteRefusal,
    Pause,
    PreemptRequests,
    ReleaseRequests,
    RequestFilter,
    ResetPrefixCache,
    Resume,
    SelfCheck,
    SetKnobs,
    SetMaxTokens,
    SetPriority,
    Subscribe,
    UndoChange,
)
from schedtop.engine.errors import ConfigError
from schedtop.engine.snapshot import Viewport


def row(**fields):
    values = {"wall": 1.7e9, "boot_id": "b", "step": 3, "actor": Actor(uid=0, client="cli"), "action": "Pause"}
    return AuditRow(**{**values, "outcome": "done", **fields})


@pytest.fixture
def log(folder):
    log = AuditLog(folder / "deep" / "audit.sqlite")
    yield log
    log.close()


def test_rows_come_back_newest_first_with_their_values(log):
    for number in range(5):
        log.write(row(reason=f"r{number}", before={"a": number}, after=[number])).result(10)
    newest = log.newest(3).result(10)
    assert [entry["reason"] for entry in newest] == ["r4", "r3", "r2"]
    assert (newest[0]["before"], newest[0]["after"]) == ({"a": 4}, [4])


def test_the_file_is_private(log):
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700


def test_many_rows_that_wait_are_all_written(log):
    futures = [log.write(row(step=number)) for number in range(500)]
    assert [future.result(30) for future in futures] == list(range(1, 501))


def test_a_row_nobody_waits_for_any_more_is_written_all_the_same(log):
    log.write(row(reason="abandoned")).cancel()
    log.write(row(reason="next")).result(10)
    assert [entry["reason"] for entry in log.newest(9).result(10)] == ["next", "abandoned"]


def test_the_log_goes_on_where_it_stopped(log):
    log.write(row(reason="before")).result(10)
    log.close()
    again = AuditLog(log.path)
    again.write(row(reason="after")).result(10)
    assert [entry["reason"] for entry in again.newest(9).result(10)] == ["after", "before"]
    again.close()


def test_the_log_can_be_read_while_and_after_it_is_written(log):
    log.write(row(reason="x")).result(10)
    assert [entry["reason"] for entry in read_audit_file(log.path, 5)] == ["x"]
    log.close()
    assert [entry["reason"] for entry in read_audit_file(log.path, 5)] == ["x"]


def test_a_file_that_is_no_log_is_refused(folder):
    (folder / "other").write_text("something else, and long enough not to look like an empty database" * 20)
    with pytest.raises(ConfigError, match="can't be used"):
        AuditLog(folder / "other")
    with pytest.raises(ConfigError, match="can't be read"):
        read_audit_file(folder / "other", 1)
    with pytest.raises(ConfigError, match="there is no audit log"):
        read_audit_file(folder / "missing", 1)


def test_a_log_of_a_newer_version_is_left_alone(folder):
    with sqlite3.connect(folder / "new.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="written by another version"):
        AuditLog(folder / "new.sqlite")


def test_a_row_that_cannot_be_written_is_told_not_swallowed(log):
    with sqlite3.connect(log.path) as database:
        database.execute("DROP TABLE audit")
    database.close()
    with pytest.raises(AuditFailed, match="couldn't be written"):
        log.write(row()).result(10)


_WRITER = """
import sys
from collections import deque
from itertools import count
from pathlib import Path
from schedtop.control.audit import Actor, AuditLog, AuditRow

print("begins", flush=True)
log, waiting = AuditLog(Path(sys.argv[1])), deque()
for number in count(int(sys.argv[2])):
    waiting.append(log.write(AuditRow(wall=1.0, boot_id="b", step=number, actor=Actor(uid=0, client="w"),
                                      action="SetKnobs", outcome="done", detail="x" * (number % 500))))
    if len(waiting) > 3:
        print(waiting.popleft().result(), flush=True)
"""


def test_killed_at_any_moment_the_log_is_whole_has_every_acknowledged_row_and_goes_on(folder):
    path, moments, num_rows = folder / "audit.sqlite", random.Random(5), 0
    for moment in [0, 0, *(moments.randrange(1, 120) for _ in range(12))]:  # 0: while it opens the log
        command = [sys.executable, "-c", _WRITER, str(path), str(num_rows + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            told = [writer.stdout.readline() for _ in range(moment + 1)]
            for _ in range(moments.randrange(20_000)):  # somewhere between two rows
                pass
            writer.send_signal(signal.SIGKILL)
            told += [line for line in writer.stdout if line.endswith("\n")]
        if len(told) > 1 or num_rows:
            survived = [entry["step"] for entry in read_audit_file(path, 100_000)]
            assert len(survived) >= max(num_rows, int(told[-1]) if len(told) > 1 else 0)
            assert survived[::-1] == list(range(1, len(survived) + 1))
            num_rows = len(survived)
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert num_rows > 100


async def test_operations_are_recorded_with_who_why_and_the_state_before(serve):
    engine = serve()
    async with engine.client("night-shift") as client:
        await client.request(Pause(mode="keep", reason="maintenance"))
        await client.request(Resume())
        await client.request(SelfCheck())
        rows = await audit(client)
    resumed, paused = rows
    assert (paused["action"], paused["client"], paused["reason"]) == ("Pause", "night-shift", "maintenance")
    assert (paused["before"], paused["after"]) == ("running", "all")
    assert paused["uid"] is not None
    assert (resumed["before"], resumed["after"]) == ("all", "running")


async def audit(client):
    ack = await client.request(GetAudit())
    assert isinstance(ack, Ack)
    return ack.data["rows"]


async def test_the_row_is_on_disk_before_the_answer_is_sent(serve):
    engine = serve()
    async with engine.client() as client:
        for mode in ("keep", "wait", "keep"):
            await client.request(Pause(mode=mode))
            newest = read_audit_file(engine.audit.path, 1)[0]
            assert newest["action"] == "Pause"
        assert len(read_audit_file(engine.audit.path, 10)) == 3


async def test_an_answer_whose_row_could_not_be_written_says_what_has_happened(serve):
    engine = serve()
    with sqlite3.connect(engine.audit.path) as database:
        database.execute("DROP TABLE audit")
    database.close()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match=r"Pause was done \(step .*but the audit log") as refusal:
            await client.request(Pause(mode="keep"))
        assert refusal.value.code == "audit_failed"
        assert (await engine.snapshot(client)).pause == "all"


async def test_a_client_that_withdraws_its_own_request_leaves_no_row_but_an_operator_does(serve, make_request):
    engine = serve()
    async with engine.client() as owner, engine.client("operator") as operator:
        await owner.request(Pause(mode="keep"))
        for name in ("mine", "theirs"):
            await owner.request(make_request(name))
        await owner.request(AbortRequests(select=RequestFilter(ids=["mine"])))
        await operator.request(AbortRequests(select=RequestFilter(ids=["theirs"])))
        rows = await audit(owner)
    assert [(entry["action"], entry["client"]) for entry in rows] == [("AbortRequests", "operator"), ("Pause", "test")]


async def test_an_operators_abort_through_the_gateway_that_submitted_has_its_row(serve, make_request):
    engine = serve()
    async with engine.client("gateway") as gateway:
        await gateway.request(Pause(mode="keep"))
        await gateway.request(make_request("r1"), on_behalf_of="alice")
        await gateway.request(AbortRequests(select=RequestFilter(ids=["r1"])), on_behalf_of="operator")
        newest, *_ = await audit(gateway)
    assert (newest["action"], newest["on_behalf_of"], newest["after"]) == ("AbortRequests", "operator", ["r1"])


async def test_a_gateways_refusals_can_be_noted(serve):
    engine = serve()
    async with engine.client("gateway") as client:
        await client.request(NoteRefusal(action="AddRequest", detail="priority -9 is not hers"), on_behalf_of="eve")
        (entry,) = await audit(client)
    assert (entry["action"], entry["outcome"], entry["on_behalf_of"]) == ("AddRequest", "refused", "eve")
    assert entry["detail"] == "priority -9 is not hers"


async def test_an_endless_reason_is_refused(serve):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="the reason has 501 characters, the limit is 500"):
            await client.request(Resume(reason="x" * 501))
        with pytest.raises(CommandRefused, match="the reason has several lines: give one"):
            await client.request(Resume(reason="calm\nrow of mine"))


SELECT = RequestFilter(ids=["r1"])
AUDITED = [
    SetKnobs(changes={"max_num_seqs": 4}, confirm_within_s=60.0),
    ConfirmChange(change_id=1),
    UndoChange(),
    HoldRequests(select=SELECT),
    ReleaseRequests(select=SELECT),
    SetPriority(select=SELECT, priority=3),
    SetMaxTokens(select=SELECT, max_tokens=9),
    PreemptRequests(select=SELECT),
    AbortRequests(select=SELECT),
    HoldLease(lease_id="one", within_s=60.0),
    EndLease(lease_id="one"),
    ResetPrefixCache(),
    Pause(mode="wait"),
    Resume(),
    Drain(),
    NoteRefusal(action="NoteRefusal", detail="not hers"),
]
"""One of each kind, in an order in which none is refused."""
NEVER_A_ROW = {AddRequest, Subscribe, GetSnapshot, GetInfo, SelfCheck, DumpSteps, GetStepModel, GetState, GetAudit}


def test_every_command_is_known_to_have_a_row_or_none():
    assert {type(command) for command in AUDITED} | NEVER_A_ROW == set(get_args(AnyCommand))


async def test_every_change_confirmation_roll_back_and_operation_has_its_row_with_the_uid_the_system_tells(serve):
    engine = serve()
    async with engine.client("operator") as client:
        for command in AUDITED:
            await client.request(command)
        for question in (GetSnapshot(), GetInfo(), SelfCheck(), DumpSteps(), GetStepModel(), GetState(), Subscribe()):
            await client.request(question)
        rows = await audit(client)
    assert [row["action"] for row in reversed(rows)] == [type(command).__name__ for command in AUDITED]
    assert {(row["uid"], row["client"]) for row in rows} == {(os.getuid(), "operator")}
    assert {row["outcome"] for row in rows} == {"done", "refused"}, "the last is the note of a refusal"
    assert rows[-2]["change_id"] == 1


@pytest.mark.parametrize("command", AUDITED, ids=lambda command: type(command).__name__)
async def test_what_a_read_only_connection_or_an_engine_without_it_refuses_has_its_row_before_the_answer(
    serve, command
):
    engine = serve()
    async with engine.client("watcher", read_only=True) as watcher, engine.client("operator") as operator:
        with pytest.raises(CommandRefused, match="read-only"):
            await watcher.request(command)
        (row,) = read_audit_file(engine.audit.path, 5)
        assert (row["action"], row["outcome"], row["client"]) == (type(command).__name__, "refused", "watcher")
        engine.server._capabilities = ["GetInfo"]
        with pytest.raises(CommandRefused, match="can't carry out"):
            await operator.request(command)
        row, _ = read_audit_file(engine.audit.path, 5)
        assert (row["action"], row["outcome"], row["client"]) == (type(command).__name__, "refused", "operator")


async def test_a_refused_question_has_no_row(serve):
    engine = serve()
    async with engine.client() as client:
        for question in (GetSnapshot(viewport=Viewport(sort="nothing")), Subscribe(interval_s=0.0), DumpSteps(count=0)):
            with pytest.raises(CommandRefused):
                await client.request(question)
        assert await audit(client) == []


def test_the_log_is_written_ahead(log):
    log.write(row()).result(10)
    with contextlib.closing(sqlite3.connect(log.path)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
