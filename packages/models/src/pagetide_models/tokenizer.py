"""Text to token ids and back, exactly as the model's own file says; no torch here."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pagetide_models.chat_template import ChatTemplate
from pagetide_models.control_tokens import ControlTokens
from pagetide_models.errors import ChatTemplateError, UnsupportedModelError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Tokenizer"]

Message = Mapping[str, object]
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, from character to byte.

    Printable Latin-1 bytes stand for themselves; the others got characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """A model's tokenizer: thread-safe, and independent of where its tables came from.

    Attributes:
        vocab_size: Ids are 0..vocab_size-1; a model's own `vocab_size` may be larger (padding).
        bos_token_id, eos_token_ids: From the file's own keys.
        strips_leading_space: Whether `decode` drops one space at the very start of a text
            (SentencePiece-style models write it before the first word).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        path: str,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        chat_template: str | None = None,
        template_variables: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`.

        Args:
            backend: The tables; taken over, do not use it elsewhere.
            path: The file, for messages.
            bos_token_id: As the model's configuration names it.
            eos_token_ids: Likewise.
            prefix_ids: Special ids before a text, where no post-processor adds them.
            suffix_ids: Special ids behind it.
            chat_template: Jinja source.
            template_variables: What the template is given besides the messages (``bos_token`` …).

        Raises:
            UnsupportedModelError: The decoder is neither byte-level nor SentencePiece-style.
        """
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self._backend = backend
        self._lock = threading.Lock()
        self._prefix, self._suffix = list(prefix_ids), list(suffix_ids)
        self._added = dict(backend.get_added_tokens_decoder())
        kinds = _decoder_kinds(backend)
        self._alphabet = byte_level_alphabet() if "ByteLevel" in kinds else None
        if self._alphabet is None and not kinds & {"ByteFallback", "Metaspace"}:
            raise UnsupportedModelError(
                f"{path}: a tokenizer decoding by {sorted(kinds) or 'nothing'} is not supported; "
                "byte-level BPE and SentencePiece-style ones are"
            )
        self.strips_leading_space = self._alphabet is None and bool(kinds & {"Strip", "Metaspace"})
        self._bytes: dict[int, bytes | None] = {}
        self._template = (
            None if chat_template is None else ChatTemplate(chat_template, template_variables or {})
        )
        self._control = ControlTokens(
            {id_: token for id_, token in self._added.items() if token.special}
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            add_special_tokens: Add what the model's file says belongs around a text (such as a
                beginning-of-sequence id; many models have none).
            allow_special: Read control tokens written in `text` as those tokens. Off, they are
                encoded as the characters they are: text from outside cannot end a turn.
        """
        with self._lock:  # the switch is state of the backend
            self._backend.encode_special_tokens = not allow_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: An id is negative.
        """
        parts = []
        for token_id in ids:
            part = self.id_to_bytes(token_id)
            if part is None and not skip_special_tokens:
                part = (self._backend.id_to_token(token_id) or "").encode()
            parts.append(part or b"")
        text = b"".join(parts).decode("utf-8", errors="replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def id_to_bytes(self, token_id: int) -> bytes | None:
        """The exact bytes that a token adds to a text, for incremental detokenisation.

        Returns:
            The bytes; they may be part of a character. None for special tokens, and for ids that a
            model's padded vocabulary has but the tokenizer does not.

        Raises:
            ValueError: The id is negative.
        """
        if token_id not in self._bytes:
            if token_id < 0:
                raise ValueError(f"token id {token_id} is negative")
            self._bytes[token_id] = self._to_bytes(token_id)
        return self._bytes[token_id]

    def _to_bytes(self, token_id: int) -> bytes | None:
        added = self._added.get(token_id)
        if added is not None:
            return None if added.special else added.content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[character] for character in token)
            except KeyError:
                return str(token).encode()  # never merged from text; kept as it is written
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brought a chat template."""
        return self._template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render a conversation with the model's own template, within bounds.

        To get ids, call `encode_chat`: it keeps control tokens in a message from taking effect.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            add_generation_prompt: End with the opening of the assistant's turn.
            variables: Further names for the template, such as ``tools``.

        Raises:
            ChatTemplateError: There is no template, it is wrong or refuses the messages, or it
                exceeds its bounds of work and time.
        """
        if self._template is None:
            raise ChatTemplateError(
                "the model has no chat template; write the prompt out and use encode"
            )
        return self._template.render(messages, add_generation_prompt, variables or {})

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a conversation: the template's control tokens count, a message's do not.

        Equal to encoding `apply_chat_template`'s text, except that a control token written inside a
        message is encoded as the characters it consists of.

        Raises:
            ChatTemplateError: As `apply_chat_template`.
        """
        hidden = self._control.hide(messages)
        text = self.apply_chat_template(
            messages if hidden is None else hidden.messages,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        if hidden is None:
            return self.encode(text, add_special_tokens=False, allow_special=True)
        ids: list[int] = []
        for piece in self._control.split(text, hidden):
            ids += (
                [piece] if isinstance(piece, int) else self.encode(piece, add_special_tokens=False)
            )
        return ids


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {entry["type"] for entry in state.get("decoders", [state])}
