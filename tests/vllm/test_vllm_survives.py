"""What clients and crashes can't do to a real vLLM: mangled frames, wild commands, `kill -9`, an end under load."""

import asyncio
import contextlib
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from vllm_server import PLAIN, Served, end, kill, serving

from schedtop.control.client import Client, CommandRefused, Disconnected
from schedtop.control.framing import add_header, encode
from schedtop.control.messages import (
    Ack,
    ConfirmChange,
    DumpSteps,
    Envelope,
    GetAudit,
    GetSnapshot,
    Hello,
    HoldRequests,
    Pause,
    PreemptRequests,
    ReleaseRequests,
    RequestFilter,
    ResetPrefixCache,
    Resume,
    SelfCheck,
    SetKnobs,
    SetPriority,
    UndoChange,
)
from schedtop.engine.knobs import KNOB_NAMES
from schedtop.engine.snapshot import Viewport

EVERYTHING = RequestFilter(id_prefix="cmpl-")
OTHER_PORT = 8474
PROMPTS = ["alpha", "beta beta", "gamma gamma gamma", "delta"]
NUM_TOKENS = 1200


def wild_value(random: random.Random) -> Any:
    return random.choice(
        [-1, 0, 1, 7, 64, 512, 513, 1 << 40, -(1 << 63), 0.5, -0.1, 1e308, True, "fcfs", "priority", "x"]
    )


def wild_command(random: random.Random) -> Any:
    """Anything but what ends or freezes requests: their outputs are compared."""
    names = [*KNOB_NAMES, "max_num_running_reqs", "", "é" * 50]
    rows = random.choice([0, 1, 64, 1000, 1 << 30, -1])
    return random.choice([
        SetKnobs(changes={random.choice(names): wild_value(random) for _ in range(random.randint(0, 3))}),
        SetKnobs(changes={"max_num_batched_tokens": random.choice([16, 64, 512]), "policy": "priority"}),
        SetKnobs(changes={"max_num_seqs": random.randint(1, 32), "watermark": random.random() / 4}),
        SetPriority(select=EVERYTHING, priority=random.choice([-5, 0, 5, 1 << 31, -(1 << 40)])),
        PreemptRequests(select=EVERYTHING),
        HoldRequests(select=EVERYTHING),
        ReleaseRequests(select=EVERYTHING),
        ReleaseRequests(select=RequestFilter(ids=["nobody", ""], status="no such status")),
        ResetPrefixCache(preempt_running=random.random() < 0.5),
        UndoChange(change_id=random.choice([None, 0, -1, 1 << 60])),
        ConfirmChange(change_id=random.randint(-1, 5)),
        DumpSteps(count=random.choice([1, 0, -1, 1 << 40])),
        GetSnapshot(viewport=Viewport(running_rows=rows, waiting_rows=rows, kv_cells=rows, sort="priority")),
        SelfCheck(),
    ])  # fmt: skip


async def mangle(socket: str, random: random.Random) -> None:
    """A connection that greets or doesn't, sends a broken frame and reads until it is thrown out, or leaves."""
    reader, writer = await asyncio.open_unix_connection(socket)
    whole = add_header(encode(Envelope(id=1, command=wild_command(random))))
    if random.random() < 0.7:
        writer.write(add_header(encode(Hello(client="fuzz"))))
    frame = bytearray(whole)
    match random.randrange(4):
        case 0:
            frame[random.randrange(len(frame))] ^= 1 << random.randrange(8)
        case 1:
            frame = bytearray(random.randbytes(random.randint(1, 300)))
        case 2:
            frame = bytearray(struct.pack(">I", random.choice([0, 1, 1 << 31, (1 << 32) - 1])) + frame[4:])
        case 3:
            del frame[random.randrange(1, len(frame)) :]
    with contextlib.suppress(OSError):
        writer.write(bytes(frame))
        writer.write_eof()
        await writer.drain()
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_vllm_serves_on_through_mangled_frames_and_wild_commands(
    served: Served, operator: Any, load: Any
) -> None:
    expected = [(await load.add(prompt, NUM_TOKENS))["choices"][0]["text"] for prompt in PROMPTS]
    tasks = [load.add(prompt, NUM_TOKENS) for prompt in PROMPTS]
    dice, outcomes = random.Random(5), set()
    async with await Client.connect(served.socket, name="fuzz") as client:
        for number in range(150):
            try:
                outcomes.add(type(await client.request(wild_command(dice))).__name__)
            except CommandRefused as refused:
                outcomes.add(refused.code)
            if number % 3 == 0:
                await mangle(served.socket, dice)
            if number % 10 == 0:
                await operator.clear_holds()
    await operator.clear_holds()
    answers = [await task for task in tasks]
    assert [answer["choices"][0]["text"] for answer in answers] == expected
    assert {"Ack", "KnobsAck", "knob_refused"} <= outcomes
    assert "internal" not in outcomes
    ack = await operator.request(SelfCheck())
    assert ack.data["faults"] == []


async def test_the_audit_log_tells_who_changed_what(operator: Any) -> None:
    await operator.request(SetKnobs(changes={"max_num_seqs": 7}, reason="less at a time"))
    with pytest.raises(CommandRefused):
        await operator.request(SetKnobs(changes={"max_num_seqs": 7000}, reason="too much"))
    ack = await operator.request(GetAudit(limit=5))
    assert isinstance(ack, Ack)
    refused, applied = ack.data["rows"][:2]
    assert (applied["action"], applied["reason"], applied["client"]) == ("SetKnobs", "less at a time", "test")
    assert applied["after"] == {"max_num_seqs": 7}
    assert refused["outcome"] == "refused" != applied["outcome"]
    assert "7000" in refused["detail"]


async def test_resume_takes_hold_on_an_engine_that_was_never_busy(operator: Any, load: Any) -> None:
    await operator.request(Pause(mode="keep"))
    task = load.add("arrives while paused", 20)
    await operator.settle(lambda snapshot: snapshot.num_waiting == 1)
    await operator.request(Resume())
    assert (await task)["usage"]["completion_tokens"] == 20


async def test_a_killed_vllm_leaves_a_socket_that_the_next_one_takes_over(
    vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runtime = tmp_path_factory.mktemp("k")
    with serving(vllm_folder, runtime, OTHER_PORT, PLAIN) as first:
        client = await Client.connect(first.socket, name="test")
        boot_id = client.welcome.info.boot_id
        kill(first.process)
        assert [type(message).__name__ async for message in client.messages()][-1] == "Goodbye"
        with pytest.raises(Disconnected):
            await client.request(GetSnapshot())
        await client.close()
    assert os.path.exists(first.socket)  # noqa: ASYNC240, PTH110  (a look, nothing that blocks)
    with serving(vllm_folder, runtime, OTHER_PORT, PLAIN) as second:
        async with await Client.connect(second.socket, name="test") as client:
            assert client.welcome.info.boot_id != boot_id
            audit = await client.request(GetAudit(limit=1))
            assert isinstance(audit, Ack)
        async with await Client.connect(second.socket, name="watcher") as watcher:
            assert end(second.process) in (0, -15, 143)
            # vLLM may end its engine process before that has said why: then the closed connection has to do.
            assert [type(message).__name__ async for message in watcher.messages()][-1] == "Goodbye"
