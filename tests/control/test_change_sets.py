"""Knob changes over the socket: compare-and-set, dry run, all or nothing, confirm or roll back, undo, audit."""

import asyncio

import pytest

from schedtop.control.changes import NUM_CHANGES_KEPT, Change, ChangeBook, ChangeState
from schedtop.control.commands import SERVER
from schedtop.control.errors import CommandRefused
from schedtop.control.messages import (
    Ack,
    ConfirmChange,
    EventBatch,
    GetAudit,
    KnobsAck,
    SetKnobs,
    SnapshotUpdate,
    Subscribe,
    UndoChange,
)
from schedtop.engine.errors import KnobRefused
from schedtop.engine.snapshot import EventKind


async def change(client, confirm_within_s=None, dry_run=False, expect_generation=None, reason="", **changes):
    reply = await client.request(
        SetKnobs(
            changes=changes,
            confirm_within_s=confirm_within_s,
            dry_run=dry_run,
            expect_generation=expect_generation,
            reason=reason,
        )
    )
    assert isinstance(reply, KnobsAck)
    return reply


async def audit_rows(client):
    ack = await client.request(GetAudit())
    assert isinstance(ack, Ack)
    return ack.data["rows"]


async def knobs_of(engine, client):
    return (await engine.snapshot(client)).knobs


async def test_a_change_is_acknowledged_with_before_after_step_and_generation(serve):
    engine = serve()
    async with engine.client() as client:
        ack = await change(client, max_num_seqs=4, watermark=0.1)
        assert ack.before == {"max_num_seqs": 8, "watermark": 0.0}
        assert ack.after == {"max_num_seqs": 4, "watermark": 0.1}
        assert (ack.change_id, ack.generation) == (1, 1)
        snapshot = await engine.snapshot(client)
    assert (snapshot.knobs.max_num_seqs, snapshot.generation) == (4, 1)


async def test_one_bad_value_leaves_every_knob_as_it_was(serve):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="max_num_batched_tokens=0 is below its minimum 1"):
            await change(client, max_num_seqs=4, max_num_batched_tokens=0)
        assert (await knobs_of(engine, client)).max_num_seqs == 8


async def test_a_misspelt_knob_is_refused_with_the_nearest_name(serve):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="did you mean 'max_num_seqs'"):
            await change(client, max_num_seq=4)


async def test_a_change_without_any_knob_is_refused(serve):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="no knob is named"):
            await change(client)


async def test_a_stale_change_is_refused_and_shown_what_it_conflicts_with(serve):
    engine = serve()
    async with engine.client("night-shift") as first, engine.client() as second:
        seen = (await engine.snapshot(second)).generation
        await change(first, max_num_seqs=4, reason="too many preemptions")
        with pytest.raises(CommandRefused) as refusal:
            await change(second, max_num_seqs=6, expect_generation=seen)
        assert refusal.value.code == "conflict"
        for part in ("night-shift", "max_num_seqs 8 -> 4", "too many preemptions"):
            assert part in refusal.value.message
        assert (await knobs_of(engine, second)).max_num_seqs == 4
        ack = await change(second, max_num_seqs=6, expect_generation=1)
        assert ack.generation == 2


async def test_a_generation_the_engine_never_had_is_not_blamed_on_somebody(serve):
    engine = serve()
    async with engine.client() as client:
        for generation in (-3, 5):
            with pytest.raises(
                CommandRefused, match=f"generation {generation}.*this engine was never there"
            ) as refusal:
                await client.request(SetKnobs(changes={"max_num_seqs": 2}, expect_generation=generation))
            assert refusal.value.code == "conflict"


async def test_a_dry_run_gives_the_same_answer_and_changes_nothing(serve):
    engine = serve()
    async with engine.client() as client:
        dry = await change(client, dry_run=True, max_num_seqs=4)
        assert dry.dry_run
        assert dry.change_id == 0
        snapshot = await engine.snapshot(client)
        assert (snapshot.knobs.max_num_seqs, snapshot.generation) == (8, 0)
        assert await audit_rows(client) == []
        real = await change(client, max_num_seqs=4)
        assert (dry.before, dry.after) == (real.before, real.after)
        with pytest.raises(CommandRefused, match="above its ceiling 8"):
            await change(client, dry_run=True, max_num_seqs=9)


async def test_setting_what_is_set_already_is_no_change(serve):
    engine = serve()
    async with engine.client() as client:
        ack = await change(client, confirm_within_s=60.0, max_num_seqs=8)
        assert (ack.change_id, ack.generation, ack.confirm_by_mono) == (0, 0, None)
        assert (await engine.update(client)).pending_change is None


async def test_an_unconfirmed_change_rolls_back_even_when_its_author_is_gone(serve, next_message):
    engine = serve()
    async with engine.client() as watcher:
        await watcher.request(Subscribe(interval_s=None))
        async with engine.client("gone") as author:
            await change(author, confirm_within_s=0.2, max_num_seqs=3, reason="trial")
        changed = await next_message(watcher, EventBatch, lambda batch: _new_value(batch, "max_num_seqs") == 3)
        assert changed
        await next_message(watcher, EventBatch, lambda batch: _new_value(batch, "max_num_seqs") == 8)
        snapshot = await engine.snapshot(watcher)
        assert (snapshot.knobs.max_num_seqs, snapshot.generation) == (8, 2)
        rows = await audit_rows(watcher)
    undone, made = rows
    assert (made["action"], made["client"], made["change_id"]) == ("SetKnobs", "gone", 1)
    assert (undone["action"], undone["outcome"], undone["client"]) == ("RollBack", "rolled back", "schedtop")
    assert undone["reason"] == "not confirmed within 0.2 s"
    assert (undone["before"], undone["after"]) == ({"max_num_seqs": 3}, {"max_num_seqs": 8})


def _new_value(batch, name):
    changes = [event.changes[name][1] for event in batch.events if event.kind is EventKind.KNOBS_CHANGED]
    return changes[-1] if changes else None


async def test_a_confirmed_change_stays(serve):
    engine = serve()
    async with engine.client() as client:
        ack = await change(client, confirm_within_s=0.3, max_num_seqs=3)
        pending = (await engine.update(client)).pending_change
        assert pending is not None
        assert pending.changes == {"max_num_seqs": (8, 3)}
        assert pending.rolls_back_at_mono == ack.confirm_by_mono
        kept = await client.request(ConfirmChange(change_id=ack.change_id))
        assert isinstance(kept, Ack)
        assert kept.did.startswith("kept change 1")
        assert (await engine.update(client)).pending_change is None
        with pytest.raises(CommandRefused, match="waits for no confirmation: it is kept"):
            await client.request(ConfirmChange(change_id=ack.change_id))
        await asyncio.sleep(0.35)  # past the deadline: nothing may happen, so there is nothing to wait for
        assert (await knobs_of(engine, client)).max_num_seqs == 3


async def test_a_roll_back_that_the_engine_refuses_is_recorded_and_leaves_nothing_pending(serve, monkeypatch):
    engine = serve()
    async with engine.client() as client:
        await change(client, confirm_within_s=0.2, max_num_seqs=3)
        original = engine.core.set_knobs

        def refuses(changes, *arguments, **named):
            if changes == {"max_num_seqs": 8} and not named.get("dry_run"):
                raise KnobRefused("not now")
            return original(changes, *arguments, **named)

        monkeypatch.setattr(engine.core, "set_knobs", refuses)
        async with asyncio.timeout(60):
            while len(rows := await audit_rows(client)) < 2:
                pass
        assert (rows[0]["action"], rows[0]["outcome"], rows[0]["detail"]) == ("RollBack", "failed", "not now")
        assert (await engine.update(client)).pending_change is None
        assert (await knobs_of(engine, client)).max_num_seqs == 3


async def test_what_waits_for_confirmation_cannot_be_changed_from_under_it(serve):
    engine = serve()
    async with engine.client() as client:
        ack = await change(client, confirm_within_s=60.0, max_num_seqs=3)
        with pytest.raises(CommandRefused, match="max_num_seqs belongs to change 1"):
            await change(client, max_num_seqs=5)
        with pytest.raises(CommandRefused, match="only one change may wait"):
            await change(client, confirm_within_s=60.0, watermark=0.1)
        await change(client, watermark=0.1)
        undone = await client.request(UndoChange(change_id=ack.change_id))
        assert isinstance(undone, KnobsAck)
        assert undone.after == {"max_num_seqs": 8}
        assert (await engine.update(client)).pending_change is None
        await change(client, max_num_seqs=5)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 86_401.0])
async def test_a_confirmation_time_out_of_range_is_refused(serve, seconds):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match="confirm_within_s"):
            await change(client, confirm_within_s=seconds, max_num_seqs=3)


async def test_undo_takes_back_the_last_change_then_the_one_before(serve):
    engine = serve()
    async with engine.client() as client:
        await change(client, max_num_seqs=4)
        await change(client, watermark=0.2, max_num_batched_tokens=128)
        first = await client.request(UndoChange(reason="worse"))
        assert isinstance(first, KnobsAck)
        assert first.after == {"watermark": 0.0, "max_num_batched_tokens": 256}
        second = await client.request(UndoChange())
        assert isinstance(second, KnobsAck)
        assert second.after == {"max_num_seqs": 8}
        with pytest.raises(CommandRefused, match="nothing to undo"):
            await client.request(UndoChange())
        with pytest.raises(CommandRefused, match="undone already"):
            await client.request(UndoChange(change_id=1))
        with pytest.raises(CommandRefused, match="no change 99"):
            await client.request(UndoChange(change_id=99))


async def test_an_undo_never_overwrites_what_somebody_changed_since(serve):
    engine = serve()
    async with engine.client() as client, engine.client("other") as other:
        ack = await change(client, max_num_seqs=4, watermark=0.2)
        await change(other, max_num_seqs=6)
        with pytest.raises(CommandRefused, match=r"max_num_seqs was changed since change 1.*other") as refusal:
            await client.request(UndoChange(change_id=ack.change_id))
        assert refusal.value.code == "conflict"
        knobs = await knobs_of(engine, client)
        assert (knobs.max_num_seqs, knobs.watermark) == (6, 0.2)


async def test_an_undo_can_be_undone_by_its_number(serve):
    engine = serve()
    async with engine.client() as client:
        await change(client, max_num_seqs=4)
        undo = await client.request(UndoChange())
        assert isinstance(undo, KnobsAck)
        redo = await client.request(UndoChange(change_id=undo.change_id))
        assert isinstance(redo, KnobsAck)
        assert redo.after == {"max_num_seqs": 4}


async def test_every_watcher_hears_of_a_change(serve, next_message):
    engine = serve()
    async with engine.client() as watcher, engine.client() as author:
        await watcher.request(Subscribe(interval_s=0.02))
        await change(author, max_num_seqs=4)
        batch = await next_message(watcher, EventBatch)
        assert batch.events[-1].changes == {"max_num_seqs": (8, 4)}
        update = await next_message(watcher, SnapshotUpdate, lambda update: update.snapshot.generation == 1)
        assert update.snapshot.knobs.max_num_seqs == 4


async def test_concurrent_changes_based_on_one_generation_let_exactly_one_win(serve):
    engine = serve()
    async with engine.client() as client:
        attempts = [change(client, max_num_seqs=n, expect_generation=0) for n in range(1, 8)]
        results = await asyncio.gather(*attempts, return_exceptions=True)
    won = [result for result in results if isinstance(result, KnobsAck)]
    assert len(won) == 1
    assert all(isinstance(result, CommandRefused) for result in results if result not in won)


async def test_a_refusal_is_in_the_audit_log_with_what_was_wanted(serve):
    engine = serve()
    async with engine.client("autopilot") as client:
        with pytest.raises(CommandRefused):
            await change(client, max_num_seqs=9, reason="more!")
        (row,) = await audit_rows(client)
    assert (row["outcome"], row["client"], row["reason"]) == ("refused", "autopilot", "more!")
    assert row["after"] == {"max_num_seqs": 9}
    assert "above its ceiling 8" in row["detail"]


async def test_for_whom_a_gateway_speaks_is_recorded(serve):
    engine = serve()
    async with engine.client("gateway") as client:
        await client.request(SetKnobs(changes={"max_num_seqs": 4}), on_behalf_of="token:ops")
        (row,) = await audit_rows(client)
    assert (row["client"], row["on_behalf_of"]) == ("gateway", "token:ops")


def test_a_pending_change_never_falls_out_of_the_book() -> None:
    book = ChangeBook()
    pending = book.add(make_change())
    pending.state = ChangeState.PENDING
    for _ in range(NUM_CHANGES_KEPT + 5):
        book.add(make_change())
    assert book.pending is pending
    assert book.confirmable(pending.change_id) is pending


def make_change() -> Change:
    return Change(change_id=0, generation=1, before={"max_bypass": 1}, after={"max_bypass": 2}, actor=SERVER)


async def test_a_number_that_no_message_can_carry_is_refused_before_it_is_sent(serve):
    engine = serve()
    async with engine.client() as client:
        with pytest.raises(CommandRefused, match=f"SetKnobs: {10**30} is outside .* which is what a message can carry"):
            await change(client, max_num_seqs=10**30)
        assert (await knobs_of(engine, client)).max_num_seqs == 8
