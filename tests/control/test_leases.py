"""Leases: what is changed under one comes back when its holder falls silent, and never over somebody else's change."""

import pytest

from schedtop.control.errors import CommandRefused
from schedtop.control.messages import (
    Drain,
    EndLease,
    GetAudit,
    HoldLease,
    Pause,
    SetKnobs,
    UndoChange,
)
from schedtop.engine.snapshot import PauseState

SHORT = 0.05


async def until_row(client, matches):
    """Ask for the audit log until it has such a row; the test's time limit ends a wait for nothing."""
    while not any(matches(row) for row in await rows(client)):
        pass
    return await rows(client)


def undoes(change_id):
    return lambda row: row["action"] == "UndoChange" and f"undoes change {change_id}" in row["detail"]


async def rows(client):
    return (await client.request(GetAudit())).data["rows"]


async def test_changes_of_a_silent_holder_are_undone_newest_first(serve):
    engine = serve()
    async with engine.client("gone") as holder, engine.client() as client:
        await holder.request(HoldLease(lease_id="a", within_s=SHORT))
        await holder.request(SetKnobs(changes={"max_num_seqs": 4}, lease_id="a"))
        await holder.request(SetKnobs(changes={"max_num_seqs": 3, "watermark": 0.1}, lease_id="a"))
        newest, older = (await until_row(client, undoes(1)))[:2]
        snapshot = await engine.snapshot(client)
        assert (snapshot.knobs.max_num_seqs, snapshot.knobs.watermark) == (8, 0.0)
    assert [row["action"] for row in (newest, older)] == ["UndoChange", "UndoChange"]
    assert newest["reason"] == "lease a wasn't renewed within 0.05 s"
    assert (older["after"], newest["after"]) == ({"max_num_seqs": 4, "watermark": 0.0}, {"max_num_seqs": 8})


async def test_a_renewed_lease_keeps_its_changes_and_an_ended_one_for_good(serve):
    engine = serve()
    async with engine.client() as client:
        await client.request(HoldLease(lease_id="a", within_s=SHORT))
        await client.request(HoldLease(lease_id="a", within_s=60.0))
        await client.request(SetKnobs(changes={"max_num_seqs": 4}, lease_id="a"))
        await client.request(HoldLease(lease_id="b", within_s=SHORT))
        await client.request(SetKnobs(changes={"watermark": 0.1}, lease_id="b"))
        await until_row(client, undoes(2))  # b ran out, after a would have
        ack = await client.request(EndLease(lease_id="a"))
        assert ack.did == "ended lease a; 1 changes made under it stay as they are"
        assert (await engine.snapshot(client)).knobs.max_num_seqs == 4
        with pytest.raises(CommandRefused, match="no lease 'a' is in force"):
            await client.request(SetKnobs(changes={"max_num_seqs": 5}, lease_id="a"))
        assert (await engine.snapshot(client)).knobs.max_num_seqs == 4


async def test_what_an_operator_has_turned_since_is_left_alone_and_the_rest_comes_back(serve):
    engine = serve()
    async with engine.client() as client:
        await client.request(HoldLease(lease_id="a", within_s=0.5))
        await client.request(SetKnobs(changes={"watermark": 0.1}, lease_id="a"))
        await client.request(SetKnobs(changes={"max_num_seqs": 4}, lease_id="a"))
        await client.request(SetKnobs(changes={"max_num_seqs": 5}, reason="an operator"))
        log = await until_row(client, undoes(1))
        snapshot = await engine.snapshot(client)
        assert (snapshot.knobs.max_num_seqs, snapshot.knobs.watermark) == (5, 0.0)
        refused = [row for row in log if row["outcome"] == "refused"]
    assert "max_num_seqs was changed since change 2" in refused[0]["detail"]


async def test_a_change_that_its_maker_has_undone_is_not_touched_again(serve):
    engine = serve()
    async with engine.client() as client:
        await client.request(HoldLease(lease_id="a", within_s=0.3))
        await client.request(SetKnobs(changes={"watermark": 0.1}, lease_id="a"))
        await client.request(SetKnobs(changes={"max_num_seqs": 4}, lease_id="a"))
        await client.request(UndoChange(change_id=2))
        log = await until_row(client, undoes(1))
        assert [row["outcome"] for row in log] == ["done"] * 5, "lease, two changes, two undone"


@pytest.mark.parametrize("command", [Pause(mode="keep", lease_id="a"), Drain(limit_s=0.0, lease_id="a")])
async def test_an_engine_paused_by_a_silent_holder_goes_on(serve, command):
    engine = serve()
    async with engine.client() as client:
        await client.request(HoldLease(lease_id="a", within_s=10 * SHORT))
        await client.request(command)
        await until_row(client, lambda row: row["action"] == "Resume")
        assert (await engine.snapshot(client)).pause is PauseState.RUNNING


async def test_a_pause_that_an_operator_made_his_own_outlives_the_lease(serve):
    engine = serve()
    async with engine.client() as client:
        await client.request(HoldLease(lease_id="a", within_s=0.3))
        await client.request(SetKnobs(changes={"watermark": 0.1}, lease_id="a"))
        await client.request(Pause(mode="keep", lease_id="a"))
        await client.request(Pause(mode="keep", reason="an operator"))
        log = await until_row(client, undoes(1))
        assert (await engine.snapshot(client)).pause is not PauseState.RUNNING
    assert "Resume" not in [row["action"] for row in log]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (HoldLease(lease_id="", within_s=1.0), "is no name"),
        (HoldLease(lease_id="x" * 65, within_s=1.0), "1 to 64 printable characters"),
        (HoldLease(lease_id="a", within_s=0.0), "outside its range"),
        (EndLease(lease_id="a"), "no lease 'a' is in force"),
        (SetKnobs(changes={"max_num_seqs": 4}, lease_id="a", confirm_within_s=5.0), "give one"),
    ],
)
async def test_a_lease_that_makes_no_sense_is_refused(serve, command, words):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match=words):
            await client.request(command)
