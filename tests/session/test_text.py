"""Text in pieces: whole characters only, and no stop string leaks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from infercore.session.text import TextAssembler

texts = st.text(alphabet="abcé漢🙂 \n", max_size=30)
stops = st.lists(st.text(alphabet="abcé漢 ", min_size=1, max_size=4), max_size=3)


def cut_bytes(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(texts, st.lists(st.integers(0, 200), max_size=12))
def test_text_cut_at_any_byte_arrives_whole(text: str, cuts: list[int]) -> None:
    assembler = TextAssembler()
    pieces = [assembler.push(piece) for piece in cut_bytes(text.encode(), cuts)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + assembler.flush() == text


@given(texts, stops, st.lists(st.integers(0, 200), max_size=12))
def test_no_stop_string_is_ever_shown(text: str, stops: list[str], cuts: list[int]) -> None:
    assembler = TextAssembler(stops)
    shown = ""
    for piece in cut_bytes(text.encode(), cuts):
        shown += assembler.push(piece)
        if assembler.stopped:
            break
    shown += assembler.flush()
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert assembler.stopped == any(stop in text for stop in stops)


@given(texts, stops)
def test_text_is_shown_as_soon_as_no_stop_can_begin_in_it(text: str, stops: list[str]) -> None:
    assembler = TextAssembler(stops)
    shown = "".join(assembler.push(character.encode()) for character in text)
    if not assembler.stopped:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_that_spans_pieces_and_characters() -> None:
    assembler = TextAssembler(["é🙂"])
    data = "ab é🙂 c".encode()
    shown = "".join(assembler.push(bytes([byte])) for byte in data[:-2])
    assert shown == "ab "
    assert assembler.stopped
    assert assembler.flush() == ""


def test_bytes_that_never_become_a_character_are_replaced_at_the_end() -> None:
    assembler = TextAssembler()
    assert assembler.push("é".encode()[:1]) == ""
    assert assembler.flush() == "\ufffd"


@given(texts, stops, st.integers(0, 30))
def test_a_stop_may_begin_where_none_may_end(text: str, stops: list[str], n: int) -> None:
    assembler, shown = TextAssembler(stops), ""
    for i, character in enumerate(text):
        shown += assembler.push(character.encode(), looks=i >= n)
        if assembler.stopped:
            break
    shown += assembler.flush()
    ends = [i for i in range(n, len(text)) if any(text[: i + 1].endswith(s) for s in stops)]
    assert assembler.stopped == bool(ends)
    if ends:
        whole = text[: ends[0] + 1]
        longest = max(len(stop) for stop in stops if whole.endswith(stop))
        assert shown == whole[: len(whole) - longest]
    else:
        assert shown == text
