"""Keeping control tokens that someone wrote into a message from becoming control tokens.

A chat template turns messages into one text, and the text into ids: there, an ``<|im_end|>``
written by a user looks like the template's own. So those in messages are hidden before rendering,
behind a mark no message contains, and put back as plain text when the rendered text has been cut at
the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagetide_models.errors import ChatTemplateError

if TYPE_CHECKING:
    from tokenizers import AddedToken

__all__ = ["ControlTokens", "HiddenMessages"]


@dataclass(frozen=True, slots=True)
class HiddenMessages:
    """Messages whose control tokens are replaced by ``<mark>number<mark>``."""

    messages: list[Any]
    mark: str


class ControlTokens:
    """The special tokens of a tokenizer, as texts to look for."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self._ids = {token.content: id_ for id_, token in tokens.items()}
        self._tokens = {token.content: token for token in tokens.values()}
        self._names = list(self._ids)
        ordered = sorted(self._names, key=len, reverse=True)
        # Matches nothing where there are no tokens.
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        # What two strings that a template joins could make a token of.
        self._beginnings = tuple({name[:end] for name in ordered for end in range(1, len(name))})
        self._endings = tuple({name[start:] for name in ordered for start in range(1, len(name))})

    def hide(self, messages: Sequence[Mapping[str, object]]) -> HiddenMessages | None:
        """Hide the control tokens, and parts of them at the ends of strings; None: there are none.

        Raises:
            ChatTemplateError: The messages leave no character to mark with.
        """
        texts = list(_strings(messages))
        if not any(self._pattern.search(text) or self._is_fragment(text) for text in texts):
            return None
        noncharacters = map(chr, range(0xFDD0, 0xFDF0))
        mark = next((c for c in noncharacters if not any(c in text for text in texts)), None)
        if mark is None:
            raise ChatTemplateError("the messages use every noncharacter from U+FDD0 to U+FDEF")

        def hide_in(text: str) -> str:
            before = mark if text.startswith(self._endings) else ""
            after = mark if text.endswith(self._beginnings) else ""
            numbered = self._pattern.sub(
                lambda match: f"{mark}{self._names.index(match[0])}{mark}", text
            )
            return f"{before}{numbered}{after}"

        return HiddenMessages([_map_strings(message, hide_in) for message in messages], mark)

    def _is_fragment(self, text: str) -> bool:
        return text.startswith(self._endings) or text.endswith(self._beginnings)

    def split(self, rendered: str, hidden: HiddenMessages) -> Iterator[str | int]:
        """Cut a rendered text at the template's own control tokens: their ids, and plain texts."""
        restored = re.compile(f"{hidden.mark}(?:([0-9]+){hidden.mark})?")

        def restore(match: re.Match[str]) -> str:
            return self._names[int(match[1])] if match[1] else ""

        end, is_stripped = 0, False
        for match in [*self._pattern.finditer(rendered), None]:
            plain = rendered[end : match.start() if match else len(rendered)]
            token = self._tokens[match[0]] if match else None
            plain = plain.lstrip() if is_stripped else plain
            plain = plain.rstrip() if token is not None and token.lstrip else plain
            if plain:
                yield restored.sub(restore, plain)
            if match is not None and token is not None:
                yield self._ids[match[0]]
                end, is_stripped = match.end(), token.rstrip


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(value.values())
    elif isinstance(value, Iterable):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
