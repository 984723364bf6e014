"""Bytes to messages and back: bounds before decoding, whatever a peer sends."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedtop.control.errors import BadFrame, FrameTooLong
from schedtop.control.framing import (
    MAX_COMMAND_BYTES,
    MAX_DEPTH,
    MAX_REQUEST_BYTES,
    FrameReader,
    check_depth,
    decode_from_client,
    decode_from_server,
    encode,
    encode_frame,
)
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AddRequest,
    Envelope,
    Hello,
    RequestFilter,
    SetKnobs,
    Subscribe,
)
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import Viewport

_DEEPEST = Envelope(
    id=7,
    command=AddRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 300, 70_000],
        sampling=SamplingParams(bad_words_ids=((1, 2), (3,)), logit_bias={5: 1.0}, stop_token_ids=(1,)),
    ),
)
_COMMANDS = [
    Hello(client="test"),
    _DEEPEST,
    Envelope(id=1, command=SetKnobs(changes={"max_num_seqs": 8, "policy": "fcfs", "watermark": 0.1})),
    Envelope(id=2, command=AbortRequests(select=RequestFilter(ids=["a", "b"], id_prefix="c"))),
    Envelope(id=3, command=Subscribe(viewport=Viewport(id_contains="日本語"))),
]


def envelope_bytes(**command: Any) -> bytes:
    return msgspec.msgpack.encode({"type": "Envelope", "id": 9, "command": command})


@pytest.mark.parametrize("message", _COMMANDS, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_way(message):
    assert decode_from_client(encode(message)) == message


@given(
    messages=st.lists(st.sampled_from(_COMMANDS), max_size=6),
    cuts=st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=50),
)
def test_a_stream_cut_anywhere_gives_the_same_frames(messages, cuts):
    stream = b"".join(encode_frame(message) for message in messages)
    reader, frames, position = FrameReader(MAX_COMMAND_BYTES), [], 0
    while position < len(stream):
        step = cuts[position % len(cuts)]
        reader.feed(stream[position : position + step])
        frames += list(reader.frames())
        position += step
    assert [decode_from_client(frame) for frame in frames] == messages
    assert reader.num_buffered == 0


def test_a_frame_is_refused_when_it_is_announced_not_when_it_has_come():
    reader = FrameReader(1000)
    reader.feed((1001).to_bytes(4, "big"))
    with pytest.raises(FrameTooLong, match="1001 bytes was announced, the limit is 1000"):
        list(reader.frames())


def test_only_a_submitted_request_may_be_longer_than_a_command():
    long_prompt = Envelope(id=1, command=AddRequest(request_id="r", prompt_token_ids=[70_000] * 300_000))
    body = encode(long_prompt)
    assert MAX_COMMAND_BYTES < len(body) < MAX_REQUEST_BYTES
    assert decode_from_client(body) == long_prompt
    others = encode(Envelope(id=5, command=AbortRequests(select=RequestFilter(ids=["x" * 100] * 20_000))))
    with pytest.raises(BadFrame, match="the limit is 1048576") as refusal:
        decode_from_client(others)
    assert refusal.value.reply_id == 5


def test_the_schema_needs_less_depth_than_is_allowed():
    check_depth(encode(_DEEPEST), MAX_DEPTH - 3)
    with pytest.raises(BadFrame, match="nests deeper than 3"):
        check_depth(encode(_DEEPEST), 3)


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\x01", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\x01"])
def test_deep_nesting_is_refused_before_decoding(opener):
    with pytest.raises(BadFrame, match="nests deeper"):
        decode_from_client(opener * 100_000 + b"\xc0")


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=40,
)


def depth_of(value: Any) -> int:
    match value:
        case dict():
            return 1 + max((depth_of(item) for item in value.values()), default=0)
        case list():
            return 1 + max((depth_of(item) for item in value), default=0)
        case _:
            return 0


@given(_values, st.integers(min_value=0, max_value=6))
def test_depth_is_counted_as_python_counts_it(value, limit):
    body = msgspec.msgpack.encode(value)
    if depth_of(value) <= limit:
        check_depth(body, limit)
    else:
        with pytest.raises(BadFrame):
            check_depth(body, limit)


@given(st.lists(st.integers(min_value=-(2**63), max_value=2**64 - 1), min_size=257, max_size=400), st.booleans())
def test_long_arrays_are_skipped_by_the_right_number_of_items(numbers, has_text):
    value = [*numbers, "text"] if has_text else numbers
    check_depth(msgspec.msgpack.encode([value, "after"]), 2)
    with pytest.raises(BadFrame):
        check_depth(msgspec.msgpack.encode([value, "after"])[:-1], 2)


def test_an_array_that_claims_billions_of_items_is_refused_without_room_for_them():
    with pytest.raises(BadFrame, match="ends inside"):
        decode_from_client(b"\xdd\xff\xff\xff\xff\x01\x02")


def test_bytes_after_the_message_are_refused():
    with pytest.raises(BadFrame, match="3 bytes follow"):
        decode_from_client(encode(Hello()) + b"\x01\x02\x03")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xd9\x05ab", b"\x81", b"\xc7\x10"])
def test_what_is_no_msgpack_is_refused(body):
    with pytest.raises(BadFrame):
        decode_from_client(body)


def test_a_refused_command_is_answered_under_its_own_number():
    with pytest.raises(BadFrame, match="ResumeNow") as refusal:
        decode_from_client(envelope_bytes(type="ResumeNow"))
    assert refusal.value.reply_id == 9


def test_what_a_client_cannot_read_of_a_server_is_told_apart_from_a_crash():
    with pytest.raises(BadFrame, match="both of one version"):
        decode_from_server(encode(Hello()))
    assert decode_from_server(encode(Ack(id=1, applied_at_step=2))) == Ack(id=1, applied_at_step=2)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(body):
    with contextlib.suppress(BadFrame):
        decode_from_client(body)
