"""Text that leaves the gateway: whole characters, nothing of a stop string, the same however it was split."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedtop.control.http.text import IncrementalDecoder, StopMatcher, TextStream

SHOWN_WHOLE = ["🙂", "👨‍👩‍👧‍👦", "한국어", "ď", "naïve größer", "日本語のテキスト"]


def one_byte(token_id: int) -> bytes:
    return bytes([token_id])


def splits(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    cuts = range(1, len(text))
    return [
        [text[a:b] for a, b in itertools.pairwise([0, *chosen, len(text)])]
        for count in range(len(text))
        for chosen in itertools.combinations(cuts, count)
    ]


def run(stops: list[str], pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.matched


@pytest.mark.parametrize("text", SHOWN_WHOLE)
def test_a_character_of_several_tokens_is_never_shown_by_halves(text: str) -> None:
    decoder = IncrementalDecoder(one_byte)
    pieces = [decoder.feed(byte) for byte in text.encode()]
    assert "".join(pieces) + decoder.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_cut_at_the_end_gives_one_replacement_character(num_bytes: int) -> None:
    decoder = IncrementalDecoder(one_byte)
    shown = "".join(decoder.feed(byte) for byte in b"ok" + "🙂".encode()[:num_bytes])
    assert shown == "ok"
    assert decoder.flush() == "\ufffd"


@given(st.lists(st.binary(max_size=6), max_size=12))
def test_the_joined_stream_equals_the_one_shot_decode_of_any_bytes(tokens: list[bytes]) -> None:
    decoder = IncrementalDecoder(tokens.__getitem__)
    joined = "".join(decoder.feed(index) for index in range(len(tokens))) + decoder.flush()
    assert joined == b"".join(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "some ENDtext", "some ", "END"),
        (["END"], "some ENXtext", "some ENXtext", None),
        (["END"], "nearly at EN", "nearly at EN", None),
        (["ab", "abc"], "xyz abcd efg", "xyz ", "ab"),
        (["b", "ab"], "xxab", "xx", "ab"),
        (["aab"], "aaaab", "aa", "aab"),
        (["abcd", "bc"], "zabce", "za", "bc"),
        ([], "free text", "free text", None),
    ],
)
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_over_several_tokens_leaks_nothing_and_loses_nothing(
    stops: list[str], text: str, shown: str, matched: str | None, include_stop: bool
) -> None:
    expected = shown + (matched if include_stop and matched else "")
    for pieces in splits(text):
        assert run(stops, pieces, include_stop) == (expected, matched)


@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=4), max_size=8))
def test_the_split_of_the_text_doesnt_matter(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    shown, matched = run(stops, pieces)
    assert (shown, matched) == run(stops, list(text))
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert (matched is None) == (shown == text and not any(stop in text for stop in stops))


@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=3), st.lists(st.text("ab", max_size=3), max_size=8))
def test_what_is_held_back_can_still_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    for piece in pieces:
        matcher.feed(piece)
    held = matcher.flush()
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_strings_count_only_after_min_tokens() -> None:
    text = TextStream(one_byte, ["a"], min_tokens=2)
    shown = "".join(text.feed(byte) for byte in b"abca")
    assert (shown, text.stop_found) == ("abc", "a")


def test_a_stop_string_completed_by_the_last_bytes_is_found_at_the_end() -> None:
    text = TextStream(one_byte, ["x\ufffd"])
    shown = "".join(text.feed(byte) for byte in b"abx\xf0\x9f")
    assert (shown + text.finish(), text.stop_found) == ("ab", "x\ufffd")
