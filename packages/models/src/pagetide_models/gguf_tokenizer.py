"""A tokenizer from a GGUF file's own tables, with the pre-tokenizer rule that the file names."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from pagetide_models.config import ModelConfig
from pagetide_models.errors import ModelFormatError, UnsupportedModelError
from pagetide_models.fields import Fields
from pagetide_models.gguf import GGUFHeader
from pagetide_models.gguf_sentencepiece import sentencepiece_bpe

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.pre_tokenizers import PreTokenizer

    from pagetide_models.tokenizer import Tokenizer

__all__ = ["tokenizer_from_gguf"]

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _pre_tokenizer(rule: str, path: object) -> PreTokenizer:
    """The way a text is cut before merging, by the name in ``tokenizer.ggml.pre``.

    Each is what the models of that name have in their tokenizer.json.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if rule == "gpt-2":
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "smollm":
        # Every digit alone, also ½ and Ⅷ; only then GPT-2's cut, so "  1" is "  " and "1".
        return Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    patterns = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2}
    if rule in patterns:
        return Sequence(
            [
                Split(Regex(patterns[rule]), behavior="isolated", invert=False),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise UnsupportedModelError(
        f"{path}: pre-tokenizer rule {rule!r} is not supported (a guess would give wrong ids); "
        f"these are: gpt-2, smollm, {', '.join(patterns)}"
    )


def tokenizer_from_gguf(header: GGUFHeader, config: ModelConfig) -> Tokenizer:
    """Build a tokenizer from the ``tokenizer.*`` keys.

    Raises:
        ModelFormatError: A table is missing, or they contradict each other.
        UnsupportedModelError: A tokenizer model or a pre-tokenizer rule that is not implemented.
    """
    from pagetide_models.tokenizer import Tokenizer

    fields = Fields(header.metadata, header.path, "tokenizer.ggml.")
    tokens = _strings(fields, "tokens")
    if len(tokens) > config.vocab_size:
        raise fields.fail(
            "tokens", f"has {len(tokens)} entries for a vocabulary of {config.vocab_size}"
        )
    model = fields.text("model")
    is_sentencepiece = model == "llama"
    if is_sentencepiece:
        backend = sentencepiece_bpe(fields, tokens)
    elif model == "gpt2":
        backend = _byte_level_bpe(fields, tokens, config.architecture)
    else:
        raise UnsupportedModelError(
            f"{header.path}: tokenizer model {model!r} is not supported; byte-level BPE (gpt2) "
            "and SentencePiece-style BPE (llama) are"
        )
    _add_tokens(backend, fields, tokens)
    has_bos = fields.boolean("add_bos_token", is_sentencepiece)
    bos, eos = config.bos_token_id, config.eos_token_ids[:1]
    texts = {
        "bos_token": bos,
        "eos_token": eos[0] if eos else None,
        "pad_token": config.pad_token_id,
    }
    return Tokenizer(
        backend,
        path=str(header.path),
        bos_token_id=bos,
        eos_token_ids=config.eos_token_ids,
        prefix_ids=[bos] if has_bos and bos is not None else [],
        suffix_ids=eos if fields.boolean("add_eos_token", False) else [],
        chat_template=Fields(header.metadata, header.path).text("tokenizer.chat_template", "")
        or None,
        template_variables={
            name: tokens[id_]
            for name, id_ in texts.items()
            if id_ is not None and id_ < len(tokens)
        },
    )


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise fields.fail(key, "is missing or not a list of strings")
    return value


def _byte_level_bpe(fields: Fields, tokens: list[str], architecture: str) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    rule = fields.text("pre", "gpt-2" if architecture == "gpt2" else "")
    if not rule:
        raise UnsupportedModelError(
            f"{fields.path}: tokenizer.ggml.pre is missing, and a guess at how text is cut would "
            "give wrong ids; convert the model again with a current converter"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise fields.fail("tokens", f"holds {repeated!r} twice")
    merges = []
    for merge in _strings(fields, "merges"):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise fields.fail("merges", f"holds {merge!r}, which is not a pair")
        merges.append((left, right))
    try:
        model = BPE(vocab, merges, ignore_merges=rule in ("llama-bpe", "llama3", "llama-v3"))
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(f"{fields.path}: tokenizer.ggml.merges: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(rule, fields.path)
    backend.decoder = ByteLevel()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, fields: Fields, tokens: list[str]) -> None:
    """Control tokens become special, user-defined ones are matched whole in any text."""
    from tokenizers import AddedToken

    types = fields.get("token_type")
    if types is None:
        return
    if not isinstance(types, array) or len(types) != len(tokens):
        raise fields.fail("token_type", f"should be {len(tokens)} integers")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    whole = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    if not all(control) or not all(whole):
        raise fields.fail("tokens", "holds an empty control token")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in whole])
