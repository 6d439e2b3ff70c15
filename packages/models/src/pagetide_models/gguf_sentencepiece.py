"""SentencePiece-style BPE from a GGUF file: pieces with scores, and bytes for what has no piece.

Such a vocabulary has no list of merges: of all neighbouring pieces whose concatenation is a piece,
the one with the best score is merged first. Ranking every way to split every piece by the score of
the whole gives the same order, in the form that the `tokenizers` library works with.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Final

from pagetide_models.errors import ModelFormatError
from pagetide_models.fields import Fields

if TYPE_CHECKING:
    import tokenizers

__all__ = ["sentencepiece_bpe"]

_NORMAL, _USER_DEFINED = 1, 4
_SPACE: Final = "\u2581"
_MAX_PIECE: Final = 1024  # splitting a piece is quadratic in its length; real ones have under 100


def sentencepiece_bpe(fields: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    """Build the tokenizer of ``tokenizer.ggml.model = llama``.

    Args:
        fields: The ``tokenizer.ggml.`` keys.
        tokens: The pieces, U+2581 for a space.

    Raises:
        ModelFormatError: A table is missing or contradicts the others.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise fields.fail("tokens", f"holds {repeated!r} twice")
    unknown = fields.integer("unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise fields.fail("unknown_token_id", f"{unknown} is outside the {len(tokens)} tokens")
    try:
        model = models.BPE(
            vocab,
            _merges(fields, tokens, vocab),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    except ModelFormatError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(f"{fields.path}: tokenizer.ggml.tokens: {error}") from None
    backend = tokenizers.Tokenizer(model)
    has_prefix = fields.boolean("add_space_prefix", True)
    spaces = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), *spaces] if has_prefix else spaces
    )
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if has_prefix else text)
    return backend


def _merges(fields: Fields, tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best score first."""
    scores, kinds = fields.get("scores"), fields.get("token_type")
    if not isinstance(scores, array) or scores.typecode not in "fd" or len(scores) != len(tokens):
        raise fields.fail("scores", f"should be {len(tokens)} numbers")
    if kinds is not None and not (isinstance(kinds, array) and len(kinds) == len(tokens)):
        raise fields.fail("token_type", f"should be {len(tokens)} integers")
    ranked: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        if kinds is not None and kinds[index] not in (_NORMAL, _USER_DEFINED):
            continue
        if len(token) > _MAX_PIECE:
            raise fields.fail("tokens", f"holds a piece of {len(token)} characters")
        if not math.isfinite(scores[index]):
            raise fields.fail("scores", f"holds {scores[index]} for {token!r:.60}")
        for end in range(1, len(token)):
            left, right = vocab.get(token[:end]), vocab.get(token[end:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right, tokens[left], tokens[right]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
