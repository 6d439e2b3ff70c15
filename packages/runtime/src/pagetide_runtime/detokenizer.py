"""Ids to text, exactly and as they come.

A token is a run of bytes and a character may need several tokens, so bytes go through an
incremental UTF-8 decoder and a character appears when its last byte does. Text that may still turn
out to be the beginning of a stop string is held back until it cannot.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokenizer", "TokenBytes"]


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def id_to_bytes(self, token_id: int, /) -> bytes | None:
        """The token's exact bytes; None for a special token, which has no text."""


class Detokenizer:
    """The text of one request; the pieces it returns, joined, are its `text`.

    Args:
        tokenizer: gives each token's bytes.
        strips_leading_space: whether a space that begins the text is dropped, as tokenizers of the
            SentencePiece kind do, which put one before the first word.
        stop: stop strings; text from the first one on is never returned. Which comes first is
            decided as if the text came a character at a time, so it does not depend on how the
            tokens were cut: the stop string that is complete earliest, and of those the longest.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop: Sequence[str] = (),
        *,
        strips_leading_space: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._strips_space = strips_leading_space
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._pieces: list[str] = []
        self.num_tokens = 0
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """Adds one token; returns the text that became certain with it.

        Once `is_stopped`, further tokens are ignored and `num_tokens` stays at the token that
        completed the stop string.
        """
        if self.is_stopped:
            return ""
        self.num_tokens += 1
        token_bytes = self._tokenizer.id_to_bytes(token_id)
        return self._emit(self._decoder.decode(token_bytes) if token_bytes else "")

    def finish(self) -> str:
        """Returns what was held back: an unfinished stop string, half a character (U+FFFD)."""
        if self.is_stopped:
            return ""
        piece = self._emit(self._decoder.decode(b"", final=True))
        if not self.is_stopped:
            rest, self._held = self._held, ""
            self._pieces.append(rest)
            piece += rest
        return piece

    def _emit(self, piece: str) -> str:
        if self._strips_space and piece:
            self._strips_space = False
            piece = piece.removeprefix(" ")
        self._held += piece
        matches = [
            (start + len(stop), start)
            for stop in self._stop
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            _, start = min(matches)
            certain, self._held = self._held[:start], ""
            self.is_stopped = True
        else:
            keep = self._possible_stop_length()
            cut = len(self._held) - keep
            certain, self._held = self._held[:cut], self._held[cut:]
        self._pieces.append(certain)
        return certain

    def _possible_stop_length(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
