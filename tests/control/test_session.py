"""The conversation's rules, without any socket."""

import msgspec
import pytest

from schedtop.control.framing import MAX_HELLO_BYTES, add_header, encode_frame
from schedtop.control.messages import (
    Ack,
    AddRequest,
    DumpSteps,
    EngineInfo,
    Envelope,
    ErrorReply,
    GetSnapshot,
    Goodbye,
    Hello,
    Resume,
    SetKnobs,
    Welcome,
)
from schedtop.control.session import ServerSession, SessionState

INFO = EngineInfo(name="e", model="m", boot_id="b", pid=1, version="0")


def welcome(read_only: bool) -> Welcome:
    return Welcome(protocol=1, info=INFO, knobs=[], capabilities=[], read_only=read_only)


def receive(session: ServerSession, data: bytes) -> list[Envelope]:
    """The proper commands in `data`."""
    session.feed(data)
    return list(iter(session.next_command, None))


@pytest.fixture
def session():
    return ServerSession(welcome)


@pytest.fixture
def opened(session):
    receive(session, encode_frame(Hello(client="test")))
    session.outgoing.clear()
    return session


def test_hello_is_answered_with_welcome(session):
    assert receive(session, encode_frame(Hello(client="test", read_only=True))) == []
    assert session.outgoing == [welcome(True)]
    assert session.state is SessionState.OPEN


def test_a_command_before_hello_closes(session):
    assert receive(session, encode_frame(Envelope(id=1, command=Resume()))) == []
    error, goodbye = session.outgoing
    assert isinstance(error, ErrorReply)
    assert "first message must be Hello" in error.message
    assert isinstance(goodbye, Goodbye)
    assert session.state is SessionState.CLOSED


def test_another_protocol_version_is_told_which_one_is_spoken(session):
    receive(session, encode_frame(Hello(protocol=99)))
    assert "speaks protocol version 1, the client version 99" in session.outgoing[0].message
    assert session.state is SessionState.CLOSED


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_client_without_a_usable_name_is_refused(session, name):
    receive(session, encode_frame(Hello(client=name)))
    assert session.state is SessionState.CLOSED


def test_a_stranger_may_send_no_more_than_a_greeting(session):
    receive(session, (MAX_HELLO_BYTES + 1).to_bytes(4, "big"))
    assert session.outgoing[0].code == "frame_too_long"
    assert session.state is SessionState.CLOSED


def test_hello_twice_closes(opened):
    receive(opened, encode_frame(Hello()))
    assert opened.state is SessionState.CLOSED


def test_commands_come_out_in_order_and_nothing_after_the_end(opened):
    frames = [encode_frame(Envelope(id=n, command=GetSnapshot())) for n in (1, 2)]
    broken = add_header(b"\xc1")
    commands = receive(opened, b"".join([*frames, broken, encode_frame(Envelope(id=3, command=Resume()))]))
    assert [envelope.id for envelope in commands] == [1, 2]
    assert opened.state is SessionState.CLOSED


@pytest.mark.parametrize(
    "command",
    [
        Resume(),
        SetKnobs(changes={"max_num_seqs": 1}, dry_run=True),
        AddRequest(request_id="r", prompt_token_ids=[1]),
    ],
)
def test_a_read_only_connection_changes_nothing(session, command):
    receive(session, encode_frame(Hello(read_only=True)))
    session.outgoing.clear()
    assert receive(session, encode_frame(Envelope(id=4, command=command))) == []
    ((refused, why),) = session.forbidden
    assert (refused.id, why.code, session.outgoing) == (4, "not_allowed", [])
    assert session.num_unanswered == 1, "it is owed an answer"
    assert [e.command for e in receive(session, encode_frame(Envelope(id=5, command=DumpSteps())))] == [DumpSteps()]


def test_a_misspelt_field_is_refused_and_the_conversation_goes_on(opened):
    body = msgspec.msgpack.encode(
        {"type": "Envelope", "id": 6, "command": {"type": "SetKnobs", "changes": {}, "dry_rum": True}}
    )
    assert receive(opened, add_header(body)) == []
    assert opened.outgoing[0].id == 6
    assert "dry_rum" in opened.outgoing[0].message
    assert opened.state is SessionState.OPEN


def test_a_number_may_be_used_again_only_after_its_reply(opened):
    frame = encode_frame(Envelope(id=1, command=Resume()))
    receive(opened, frame)
    opened.reply(Ack(id=1, applied_at_step=0))
    assert len(receive(opened, frame)) == 1
    receive(opened, frame)
    assert opened.state is SessionState.CLOSED


def test_every_command_is_answered_once(opened):
    receive(opened, encode_frame(Envelope(id=1, command=Resume())))
    assert opened.num_unanswered == 1
    opened.reply(Ack(id=1, applied_at_step=0))
    assert opened.num_unanswered == 0
    with pytest.raises(KeyError):
        opened.reply(Ack(id=1, applied_at_step=0))
