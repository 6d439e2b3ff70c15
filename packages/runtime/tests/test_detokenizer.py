"""Ids to text: exact, incremental, and with nothing of a stop string ever sent."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetide_runtime.detokenizer import Detokenizer


class Pieces:
    """A tokenizer whose token `i` is the i-th piece; None has no text."""

    def __init__(self, pieces: list[bytes | None]) -> None:
        self._pieces = pieces

    def id_to_bytes(self, token_id: int) -> bytes | None:
        return self._pieces[token_id]


def stream(pieces: list[bytes | None], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(Pieces(pieces), stop)
    texts = [detokenizer.push(index) for index in range(len(pieces))]
    texts.append(detokenizer.finish())
    return texts, detokenizer


def cut(data: bytes, points: list[int]) -> list[bytes | None]:
    edges = sorted({0, len(data), *(point % (len(data) + 1) for point in points)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text(), st.lists(st.integers(0, 200)))
def test_any_cut_gives_the_text_and_never_half_a_character(text: str, points: list[int]) -> None:
    texts, detokenizer = stream(cut(text.encode(), points))
    assert "".join(texts) == text == detokenizer.text
    assert all("\ufffd" not in piece for piece in texts) or "\ufffd" in text


@given(st.binary(max_size=40), st.lists(st.integers(0, 60)))
def test_invalid_bytes_are_replaced_the_same_however_they_are_cut(
    data: bytes, points: list[int]
) -> None:
    texts, _ = stream(cut(data, points))
    assert "".join(texts) == data.decode("utf-8", "replace")


def naive_stop(text: str, stop: tuple[str, ...]) -> str:
    """What is left when the text comes a character at a time."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3).map(tuple),
    st.lists(st.integers(0, 40)),
)
def test_a_stop_string_ends_the_text_wherever_the_tokens_are_cut(
    text: str, stop: tuple[str, ...], points: list[int]
) -> None:
    texts, detokenizer = stream(cut(text.encode(), points), stop)
    expected = naive_stop(text, stop)
    assert "".join(texts) == expected == detokenizer.text
    # what was sent early never had to be taken back
    sent = ""
    for piece in texts:
        sent += piece
        assert expected.startswith(sent)


# Pitfall D10: the public reports' own inputs.
@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        ([b"Hi", b"\nUser", b":", b" more"], ("\nUser:",), "Hi"),
        ([b"abcab", b"cabcab"], ("abcab",), ""),
        ([b"x", b"abcab", b"d"], ("abcabc",), "xabcabd"),
        ([b"\nUser", b" name"], ("\nUser:",), "\nUser name"),
        ([b"end", b"\nUse"], ("\nUser:",), "end\nUse"),
    ],
)
def test_stop_string_reports(
    pieces: list[bytes | None], stop: tuple[str, ...], expected: str
) -> None:
    texts, _ = stream(pieces, stop)
    assert "".join(texts) == expected


def test_tokens_behind_a_stop_string_count_for_nothing() -> None:
    detokenizer = Detokenizer(Pieces([b"a", b"STOP", b"b"]), ("STOP",))
    assert [detokenizer.push(i) for i in (0, 1, 2)] == ["a", "", ""]
    assert detokenizer.is_stopped and detokenizer.num_tokens == 2


def test_a_special_token_has_no_text_and_joins_what_stands_around_it() -> None:
    texts, _ = stream([b"\xe2\x82", None, b"\xac"])
    assert "".join(texts) == "€"


def test_a_space_that_begins_the_text_is_dropped_where_the_tokenizer_puts_one() -> None:
    pieces: list[bytes | None] = [b"", b" Hello", b" world"]
    detokenizer = Detokenizer(Pieces(pieces), strips_leading_space=True)
    assert "".join(detokenizer.push(i) for i in range(3)) + detokenizer.finish() == "Hello world"
    assert "".join(stream(pieces)[0]) == " Hello world"
