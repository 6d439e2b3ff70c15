"""Rendering a model's own chat template: it is code from outside, so sandboxed and bounded.

Python's sandboxing of attributes is Jinja's own; the bounds on work, memory and time are in
`template_sandbox`, which is imported when a template is first rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pagetide_models.errors import ChatTemplateError, ModelFormatError

if TYPE_CHECKING:
    from types import CodeType

    from pagetide_models.source import ModelSource

__all__ = ["ChatTemplate", "find_chat_template"]

MAX_TEMPLATE_CHARACTERS: Final = 1 << 18  # ten times the largest in use
BASE_WORK: Final = 1_000_000
WORK_PER_INPUT_CHARACTER: Final = 64
MAX_SECONDS: Final = 5.0


class ChatTemplate:
    """A chat template, compiled when first rendered.

    Bounds: a source of at most 262,144 characters; work of at most 1,000,000 units plus 64 for each
    character of the messages, where a unit is one loop iteration, call or operator, or one
    character or list entry that any of them makes; 5 seconds. Exceeding one raises
    `ChatTemplateError`.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Keep a template for later.

        Args:
            source: Jinja source.
            variables: Names that every rendering sees (``bos_token`` and its like).
        """
        self.source = source
        self._variables = dict(variables)
        self._code: CodeType | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Render a conversation.

        Raises:
            ChatTemplateError: The template is wrong, refuses the messages, or exceeds a bound.
        """
        from pagetide_models import template_sandbox

        if len(self.source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template has {len(self.source)} characters; "
                f"at most {MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        given = {
            "tools": None,
            "documents": None,
            **self._variables,
            **{name: plain_data(value, name) for name, value in variables.items()},
            "messages": [_message(message, index) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        if self._code is None:
            self._code = template_sandbox.compile_template(self.source)
        return template_sandbox.render(
            self._code,
            given,
            base_work=BASE_WORK,
            work_per_input=WORK_PER_INPUT_CHARACTER,
            seconds=MAX_SECONDS,
        )


def _message(message: Mapping[str, object], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(
            f"message {index} should be a mapping with a role and a content, not {message!r:.80}"
        )
    # Clients send content=None beside tool calls; templates test for presence, not for None.
    return {
        key: plain_data(value, f"message {index}, {key!r}")
        for key, value in message.items()
        if value is not None
    }


def plain_data(value: object, where: str) -> Any:
    """A copy made of exact JSON types: a template must not get at methods of richer objects.

    Raises:
        ChatTemplateError: Something else is in it; `where` opens the message.
    """
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, where) for item in value]
    raise ChatTemplateError(
        f"{where}: {type(value).__name__} is not text, a number, list or mapping"
    )


def find_chat_template(source: ModelSource) -> str | None:
    """The chat template of a model: from the GGUF key, or the folder's file of it.

    Raises:
        ModelFormatError: It is there, but not text.
    """
    if source.gguf is not None:
        value = source.gguf.metadata.get("tokenizer.chat_template")
        return value if isinstance(value, str) and value else None
    jinja = source.path / "chat_template.jinja"
    if jinja.exists():
        try:
            with open(jinja, encoding="utf-8") as file:
                return file.read(MAX_TEMPLATE_CHARACTERS + 1)
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{jinja}: not UTF-8 text ({error.reason})") from None
    from pagetide_models.safetensors import read_json_object

    for name in ("tokenizer_config.json", "chat_template.json"):
        path = source.path / name
        template = read_json_object(path).get("chat_template") if path.exists() else None
        if isinstance(template, list):  # several, by name
            named = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, dict)
            }
            template = named.get("default")
        if isinstance(template, str) and template:
            return template
    return None
