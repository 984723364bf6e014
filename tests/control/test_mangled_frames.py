"""Frames that somebody mangled: none crashes, none leaves anything behind, none costs the engine a step."""

import asyncio
import contextlib
import gc
import random
import socket

from schedtop.control.errors import BadFrame
from schedtop.control.framing import MAX_COMMAND_BYTES, FrameReader, add_header, decode_from_client, encode
from schedtop.control.messages import (
    AbortRequests,
    AddRequest,
    Envelope,
    Hello,
    RequestFilter,
    SelfCheck,
    SetKnobs,
    SnapshotUpdate,
    Subscribe,
)
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import Viewport

NUM_FRAMES = 100_000
NUM_SENT = 500
"""To a live server: each ends its connection."""
_BODIES = [
    encode(message)
    for message in (
        Hello(client="test"),
        Envelope(
            id=7,
            command=AddRequest(
                request_id="r",
                prompt_token_ids=[1, 2, 300, 70_000],
                sampling=SamplingParams(bad_words_ids=((1, 2), (3,)), logit_bias={5: 1.0}, stop_token_ids=(1,)),
            ),
        ),
        Envelope(id=1, command=SetKnobs(changes={"max_num_seqs": 8, "policy": "fcfs", "watermark": 0.1})),
        Envelope(id=2, command=AbortRequests(select=RequestFilter(ids=["a", "b"], id_prefix="c"))),
        Envelope(id=3, command=Subscribe(viewport=Viewport(id_contains="日本語"))),
    )
]


def mangled(draw: random.Random, bodies: list[bytes]) -> bytes:
    body = bytearray(draw.choice(bodies))
    for _ in range(draw.randint(1, 4)):
        match draw.randrange(3):
            case 0:
                body[draw.randrange(len(body))] = draw.randrange(256)
            case 1:
                del body[draw.randrange(len(body)) :]
                body += b"\x00"
            case _:
                body.insert(draw.randrange(len(body)), draw.randrange(256))
    return bytes(body)


def decode_mangled(draw: random.Random, count: int) -> int:
    num_refused = 0
    for _ in range(count):
        reader = FrameReader(MAX_COMMAND_BYTES)
        reader.feed(add_header(mangled(draw, _BODIES)))
        for frame in reader.frames():
            try:
                decode_from_client(frame)
            except BadFrame:
                num_refused += 1
    return num_refused


def test_100000_mangled_frames_are_messages_or_refused_and_nothing_of_them_stays():
    draw = random.Random(20)
    decode_mangled(draw, 1000)
    gc.collect()
    before = len(gc.get_objects())
    assert decode_mangled(draw, NUM_FRAMES) > NUM_FRAMES / 2
    gc.collect()
    assert len(gc.get_objects()) - before < 1000


async def test_a_live_server_survives_mangled_frames_and_the_engine_misses_no_step(serve, brisk_runner, make_request):
    engine = serve(brisk_runner, num_kv_blocks=20_000, max_model_len=200_000)
    draw = random.Random(21)
    refusable = [body for body in _BODIES if b"AbortRequests" not in body]  # may hit the request by chance

    def send_all() -> None:
        for _ in range(NUM_SENT):
            with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                one.settimeout(60)
                one.connect(str(engine.path))
                one.sendall(add_header(encode(Hello(client="mangler"))))
                one.sendall(add_header(mangled(draw, refusable)) + b"\x00\x00\x00\x01\xc1")
                while one.recv(1 << 16):
                    pass

    async with asyncio.timeout(120), engine.client() as client:
        await client.request(make_request("r1", 16, 190_000))
        await client.request(Subscribe(interval_s=0.02))
        sending = asyncio.create_task(asyncio.to_thread(send_all))
        steps: list[int] = []
        async for message in client.messages():
            if isinstance(message, SnapshotUpdate):
                steps += [record.step for record in message.steps]
                if sending.done():
                    break
        await sending
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        while len(engine.server._connections) > 1:
            await engine.snapshot(client)
        assert (await client.request(SelfCheck())).data["faults"] == []
