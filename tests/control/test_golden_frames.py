"""Frames of every released protocol version are read for ever: case B10, an old client and a new server.

`golden/vN.jsonl` has one line per message: its bytes as released, and what they mean. A released file is never
edited; a new version gets a new file. `python tests/control/test_golden_frames.py` writes the current one anew while
it isn't released.
"""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from schedtop.control.errors import BadFrame
from schedtop.control.framing import decode_from_client, decode_from_server, encode
from schedtop.control.measures import Latency, Percentiles
from schedtop.control.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    Ack,
    AddRequest,
    AnyCommand,
    ConfirmChange,
    Drain,
    DumpSteps,
    EndLease,
    EngineInfo,
    Envelope,
    ErrorReply,
    EventBatch,
    FromClient,
    FromServer,
    GetAudit,
    GetInfo,
    GetSnapshot,
    GetState,
    GetStepModel,
    Goodbye,
    Hello,
    HoldLease,
    HoldRequests,
    KnobsAck,
    NoteRefusal,
    Pause,
    PendingChange,
    PreemptRequests,
    ReleaseRequests,
    RequestFilter,
    ResetPrefixCache,
    Resume,
    SelfCheck,
    SetKnobs,
    SetMaxTokens,
    SetPriority,
    SnapshotReply,
    SnapshotUpdate,
    Subscribe,
    TokenBatch,
    TokenOutput,
    UndoChange,
    Welcome,
)
from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import Knobs, knob_table
from schedtop.engine.outputs import Touched
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import (
    Counters,
    EngineCoreEvent,
    EventKind,
    FinishReason,
    KvMap,
    LimitedBy,
    PauseState,
    PoolUsage,
    Preemption,
    RequestDetail,
    RequestRow,
    RequestStatus,
    Snapshot,
    StepRecord,
    Viewport,
    WaitReason,
)

FOLDER = Path(__file__).parent / "golden"


def _line(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


GOLDEN = [
    pytest.param(entry, id=f"{path.stem}-{entry['name']}")
    for path in sorted(FOLDER.glob("v*.jsonl"))
    for entry in _line(path)
]


@pytest.mark.parametrize("entry", GOLDEN)
def test_a_released_frame_still_means_what_it_meant(entry):
    body = bytes.fromhex(entry["hex"])
    is_ours = entry["to"] == "server"
    message = decode_from_client(body) if is_ours else decode_from_server(body)
    union: Any = FromClient if is_ours else FromServer
    assert message == msgspec.json.decode(json.dumps(entry["means"]), type=union)


def test_every_message_has_a_golden_frame_in_the_newest_version():
    recorded = {entry["name"] for entry in _line(FOLDER / f"v{PROTOCOL_VERSION}.jsonl")}
    published = {kind.__name__ for kind in get_args(FromServer)}
    assert recorded == {kind.__name__ for kind in get_args(AnyCommand)} | {"Hello"} | published


def renamed(entry: dict[str, Any], **fields: Any) -> bytes:
    """A golden message with fields added to its innermost command or to itself."""
    message = msgspec.msgpack.decode(bytes.fromhex(entry["hex"]))
    if entry["to"] == "server" and entry["name"] != "Hello":
        message["command"] = {**message["command"], **fields}
    else:
        message |= fields
    return msgspec.msgpack.encode(message)


@pytest.mark.parametrize("entry", [param for param in GOLDEN if param.values[0]["to"] == "client"])
def test_what_is_published_may_grow_without_breaking_an_old_client(entry):
    body = renamed(entry, a_field_of_the_future=[1, {"x": 2}])
    assert decode_from_server(body) == decode_from_server(bytes.fromhex(entry["hex"]))


@pytest.mark.parametrize("entry", [param for param in GOLDEN if param.values[0]["to"] == "server"])
def test_a_command_with_an_unknown_field_is_refused_never_half_carried_out(entry):
    with pytest.raises(BadFrame, match="unknown field `a_field_of_the_future`"):
        decode_from_client(renamed(entry, a_field_of_the_future=1))


@pytest.mark.parametrize("entry", GOLDEN)
def test_the_order_of_fields_does_not_matter(entry):
    message = msgspec.msgpack.decode(bytes.fromhex(entry["hex"]))
    body = msgspec.msgpack.encode(dict(reversed(message.items())))
    decode: Any = decode_from_client if entry["to"] == "server" else decode_from_server
    assert decode(body) == decode(bytes.fromhex(entry["hex"]))


def test_a_step_record_with_a_field_more_is_read_by_an_older_client():
    record = msgspec.to_builtins(_record())
    assert msgspec.convert([*record, "a field of the future"], StepRecord) == _record()
    assert msgspec.convert(record[:-1], StepRecord) == msgspec.structs.replace(_record(), num_context_tokens=0)


def test_a_snapshot_of_an_older_server_is_read_with_defaults_for_what_came_later():
    means = msgspec.to_builtins(SnapshotUpdate(snapshot=_snapshot()))
    for field in ("is_scan_cut", "kv_map", "detail", "last_step_mono"):
        del means["snapshot"][field]
    update = msgspec.convert(means, SnapshotUpdate)
    assert update.snapshot.kv_map is None
    assert not update.snapshot.is_scan_cut


def test_a_command_of_an_older_client_is_read_with_defaults_for_what_came_later():
    older = {"type": "Envelope", "id": 1, "command": {"type": "SetKnobs", "changes": {"max_num_seqs": 8}}}
    assert decode_from_client(msgspec.msgpack.encode(older)) == Envelope(
        id=1, command=SetKnobs(changes={"max_num_seqs": 8})
    )


@pytest.mark.parametrize("entry", [param for param in GOLDEN if param.values[0]["to"] == "server"])
def test_a_command_as_an_array_is_refused(entry):
    message = msgspec.msgpack.decode(bytes.fromhex(entry["hex"]))
    with pytest.raises(BadFrame):
        decode_from_client(msgspec.msgpack.encode(list(message.values())))


def _record() -> StepRecord:
    return StepRecord(
        step=12, mono=100.5, wall=1.7e9, duration_s=0.02, schedule_s=0.001, forward_s=0.018, update_s=0.001,
        budget=2048, num_decode_tokens=3, num_prefill_tokens=256, num_draft_tokens=0, num_scheduled_reqs=4,
        largest_prefill_chunk=256, num_running=4, num_waiting=2, num_deferred=1, blocks_free=80, blocks_in_use=20,
        num_admitted=1, num_resumed=0, num_preempted=1, num_finished=0, num_lost_tokens=48, num_output_tokens=4,
        limited_by=LimitedBy.BUDGET, ttft=[0.25], itl=[(0.02, 3)], e2e=[], queue_time=[0.1], num_context_tokens=900,
    )  # fmt: skip


def _row(request_id: str, status: RequestStatus) -> RequestRow:
    return RequestRow(
        request_id=request_id, status=status, priority=-1, arrived=90.0, num_prompt_tokens=300, num_output_tokens=2,
        max_tokens=64, num_computed_tokens=256, num_cached_tokens=16, num_blocks=16, wait_reason=WaitReason.KV_BLOCKS,
        wait_detail="needs 32 blocks, 20 free", position=0,
    )  # fmt: skip


def _preemption() -> Preemption:
    return Preemption(
        step=12, mono=100.5, victim="b", beneficiary="a", num_lost_tokens=48, num_blocks_freed=3,
        free_blocks_before=0, free_blocks_after=3, num_preemptions=1,
    )  # fmt: skip


def _event() -> EngineCoreEvent:
    return EngineCoreEvent(
        sequence=5, kind=EventKind.KNOBS_CHANGED, step=12, mono=100.5, wall=1.7e9, request_id="a", detail="x",
        preemption=_preemption(), changes={"max_num_seqs": (64, 32)},
    )  # fmt: skip


def _snapshot() -> Snapshot:
    return Snapshot(
        step=12, mono=100.6, wall=1.7e9, generation=3, knobs=Knobs(), pause=PauseState.RUNNING, num_running=1,
        num_waiting=1, num_deferred=0, waiting_by_reason={"KV blocks": 1},
        pool=PoolUsage(usable=100, free=80, in_use=20, cached=5, shared=2),
        running=[_row("a", RequestStatus.RUNNING)], waiting=[_row("b", RequestStatus.PREEMPTED)],
        num_running_matched=1, num_waiting_matched=1, last_step=_record(), counters=Counters(finished={"stop": 2}),
        recent_preemptions=[_preemption()], last_step_mono=100.5,
        kv_map=KvMap(blocks_per_cell=2, cells="uusc..", marks=[0]),
        detail=RequestDetail(
            request_id="a", row=_row("a", RequestStatus.RUNNING), block_ids=[1, 2], events=[_event()],
            output_token_ids=[9],
        ),
    )  # fmt: skip


def _examples() -> list[tuple[str, FromClient | FromServer]]:
    select = RequestFilter(ids=["a"], id_prefix="a", priority_at_least=1, priority_at_most=9, status="running")
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(2,), seed=1, logit_bias={3: -1.5}, logprobs=2)
    commands: list[AnyCommand] = [
        Subscribe(interval_s=0.5, viewport=Viewport(kv_cells=64, detail="a"), events=True, steps=False),
        GetSnapshot(viewport=Viewport(sort="priority", descending=True)),
        GetInfo(),
        AddRequest(request_id="a", prompt_token_ids=[1, 200, 70_000], sampling=sampling, priority=-3, cache_salt="s"),
        AbortRequests(select=select, reason="too long"),
        SetPriority(select=select, priority=-5, reason="vip"),
        PreemptRequests(select=select),
        HoldRequests(select=select),
        ReleaseRequests(select=select),
        SetMaxTokens(select=select, max_tokens=9),
        SetKnobs(changes={"max_num_seqs": 8, "watermark": 0.1, "policy": "fcfs", "prefix_caching": False},
                 expect_generation=3, confirm_within_s=60.0, reason="trial"),
        ConfirmChange(change_id=4),
        UndoChange(change_id=4, reason="worse"),
        HoldLease(lease_id="playbook 1", within_s=20.0),
        EndLease(lease_id="playbook 1", reason="done"),
        Pause(mode="wait"),
        Resume(),
        Drain(limit_s=30.0),
        ResetPrefixCache(preempt_running=True),
        SelfCheck(),
        DumpSteps(count=10),
        GetStepModel(),
        GetState(),
        GetAudit(limit=5),
        NoteRefusal(action="AddRequest", detail="priority outside the token's class"),
    ]  # fmt: skip
    info = EngineInfo(name="e", model="m", boot_id="b", pid=1, version="0.1.0", eos_token_ids=[2], max_model_len=4096)
    update = SnapshotUpdate(
        snapshot=_snapshot(),
        latencies={"ttft": Latency(now=Percentiles(count=1, p50=0.1, p90=0.1, p99=0.1, max=0.1))},
        steps=[_record()],
        pending_change=PendingChange(
            change_id=4, changes={"max_num_seqs": (64, 32)}, rolls_back_at_mono=160.0, actor="cli (uid 0)"
        ),
    )
    tokens = TokenOutput(
        request_id="a", token_ids=[7, 8], finish_reason=FinishReason.STOP, detail="", logprobs=[[(7, -0.1), (9, -2.0)]]
    )
    published: list[FromServer] = [
        Welcome(protocol=1, info=info, knobs=list(knob_table(EngineConfig())), capabilities=["SetKnobs"]),
        Ack(id=1, applied_at_step=12, found="running", did="paused",
            touched=Touched(found={"a": RequestStatus.RUNNING}, unknown=["x"], changed=["a"]), data={"left": 0}),
        KnobsAck(id=2, applied_at_step=12, change_id=4, generation=4, before={"max_num_seqs": 64},
                 after={"max_num_seqs": 32}, confirm_by_mono=160.0, warnings=["drains"]),
        ErrorReply(id=3, code="knob_refused", message="no knob is called that"),
        SnapshotReply(id=4, update=update),
        update,
        EventBatch(events=[_event()], dropped=2),
        TokenBatch(step=12, outputs=[tokens]),
        Goodbye(reason="the engine is shutting down"),
    ]  # fmt: skip
    ours: list[FromClient] = [Hello(client="cli", read_only=True)]
    ours += [Envelope(id=n, command=command, on_behalf_of="ops") for n, command in enumerate(commands)]
    return [("server", message) for message in ours] + [("client", message) for message in published]


def write_current() -> None:
    """Record the messages as this version encodes them."""
    lines = []
    for to, message in _examples():
        inner = message.command if isinstance(message, Envelope) else message
        means = json.loads(msgspec.json.encode(message))
        entry = {"name": type(inner).__name__, "to": to, "hex": encode(message).hex(), "means": means}
        lines.append(json.dumps(entry, ensure_ascii=False))
    (FOLDER / f"v{PROTOCOL_VERSION}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_current()
