"""A tokenizer from a folder's tokenizer.json, and the token texts its chat template wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagetide_models.chat_template import find_chat_template
from pagetide_models.errors import ModelFormatError
from pagetide_models.safetensors import read_json_object

if TYPE_CHECKING:
    import tokenizers

    from pagetide_models.source import ModelSource
    from pagetide_models.tokenizer import Tokenizer

__all__ = ["tokenizer_from_folder"]


def tokenizer_from_folder(source: ModelSource) -> Tokenizer:
    """Build the tokenizer of a folder.

    Raises:
        ModelFormatError: There is no tokenizer.json, or it is damaged.
        UnsupportedModelError: Its decoder is of a kind that is not implemented.
    """
    import tokenizers

    from pagetide_models.tokenizer import Tokenizer

    path = source.path / "tokenizer.json"
    if not path.exists():
        raise ModelFormatError(
            f"{path}: missing; save the tokenizer in the fast format "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(f"{path}: not a tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(
        backend,
        path=str(path),
        bos_token_id=source.config.bos_token_id,
        eos_token_ids=source.config.eos_token_ids,
        chat_template=find_chat_template(source),
        template_variables=_special_token_texts(source, backend),
    )


def _special_token_texts(source: ModelSource, backend: tokenizers.Tokenizer) -> dict[str, str]:
    """``bos_token`` and its like as templates name them: tokenizer_config.json's, else by id."""
    config = source.config
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    ids = {"bos_token": config.bos_token_id, "eos_token": eos, "pad_token": config.pad_token_id}
    texts = {
        name: backend.id_to_token(token_id) or ""
        for name, token_id in ids.items()
        if token_id is not None
    }
    path = source.path / "tokenizer_config.json"
    if path.exists():
        written = read_json_object(path)
        for name in (*ids, "unk_token"):
            token = written.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                texts[name] = token
    return texts
