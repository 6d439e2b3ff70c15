"""SentencePiece-style tokenizers from GGUF: against the algorithm itself, written out here."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pagetide_models import ModelFormatError, Tokenizer, open_model

pytest.importorskip("tokenizers", reason="needs the tokenizers package")

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    SPACE, "a", "b", "c", "d", "ab", "bc", "abc", "cd", "abcd", SPACE + "a", SPACE + "ab", "aa",
    "aaaa", SPACE * 2, SPACE * 4, "dd", "da", SPACE + "da", "é", "<", "s", ">", "\u4e16",
]  # fmt: skip
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *WORDS, "<tool>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4]


def metadata(seed: int = 0, **changes: Any) -> dict[str, Any]:
    scores = [-float(rank) for rank in range(len(TOKENS))]
    random.Random(seed).shuffle(scores)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


@pytest.fixture
def tokenizer(tiny_gguf: Callable[..., Path]) -> Callable[..., Tokenizer]:
    def build(seed: int = 0, **changes: Any) -> Tokenizer:
        path = tiny_gguf(metadata(seed, **changes), {"token_embd.weight": (320, 64)})
        return open_model(path).load_tokenizer()

    return build


def merge_best_first(text: str, scores: list[float]) -> list[int]:
    """The published algorithm: merge the neighbours whose piece scores best, the leftmost first."""
    score = {token: scores[index] for index, token in enumerate(TOKENS) if TYPES[index] in (1, 4)}
    symbols = list((SPACE + text).replace(" ", SPACE)) if text else []
    while True:
        pairs = [
            (-score[left + right], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in score
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    ids: list[int] = []
    for symbol in symbols:
        raw = [TOKENS.index(symbol)] if symbol in score else [3 + b for b in symbol.encode()]
        ids += raw
    return ids


@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_those_of_the_algorithm(tokenizer: Callable[..., Tokenizer], seed: int) -> None:
    ours = tokenizer(seed)
    scores = metadata(seed)["tokenizer.ggml.scores"]
    generator = random.Random(seed)
    for length in [0, 1, 2, 3, *range(4, 60, 4)]:
        text = "".join(generator.choice("aabbccdd  é世x") for _ in range(length))
        expected = merge_best_first(text, scores)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected) == text


def test_bytes_stand_for_what_has_no_piece(tokenizer: Callable[..., Tokenizer]) -> None:
    ours = tokenizer()
    ids = ours.encode("\U0001f600\n", add_special_tokens=False)
    assert ids == [TOKENS.index(SPACE), *(3 + byte for byte in "\U0001f600\n".encode())]
    assert [ours.id_to_bytes(id_) for id_ in ids] == [
        b" ", b"\xf0", b"\x9f", b"\x98", b"\x80", b"\n",
    ]  # fmt: skip
    assert ours.decode(ids[:3]) == "\ufffd"


def test_a_bos_is_added_unless_the_file_says_not(tokenizer: Callable[..., Tokenizer]) -> None:
    plain = tokenizer().encode("a", add_special_tokens=False)
    assert tokenizer().encode("a") == [1, *plain]
    assert tokenizer(add_bos_token=False).encode("a") == plain
    assert tokenizer(add_eos_token=True).encode("a") == [1, *plain, 2]


def test_a_file_without_the_space_prefix(tokenizer: Callable[..., Tokenizer]) -> None:
    ours = tokenizer(add_space_prefix=False, add_bos_token=False)
    assert ours.encode("d") == [TOKENS.index("d")]
    assert not ours.strips_leading_space
    assert ours.decode(ours.encode(" d")) == " d"


def test_control_tokens_are_text_unless_allowed(tokenizer: Callable[..., Tokenizer]) -> None:
    ours = tokenizer(add_bos_token=False)
    assert 2 not in ours.encode("</s>a")
    assert ours.decode(ours.encode("</s>a")) == "</s>a"
    assert ours.encode("</s>", allow_special=True) == [2]
    assert ours.encode("<tool>") == [TOKENS.index("<tool>")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": [1.0]}, "scores should be"),
        ({"scores": [1] * len(TOKENS)}, "scores should be"),
        ({"scores": [float("nan")] * len(TOKENS)}, "scores holds nan"),
        ({"token_type": [1, 2]}, "token_type should be"),
        ({"unknown_token_id": 5000}, "5000"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "'a' twice"),
        ({"tokens": [*TOKENS[:-1], "a" * 2000]}, "2000 characters"),
    ],
)
def test_tables_that_contradict_themselves(
    tokenizer: Callable[..., Tokenizer], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelFormatError, match=words):
        tokenizer(**changes)
