"""What a caller of the runtime gets back."""

from __future__ import annotations

from dataclasses import dataclass

from pagetide_scheduler import FinishReason, RequestOutput

__all__ = ["Completion", "TextChunk"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One request's answer.

    Attributes:
        index: the prompt's place in the call.
        sample: which of the prompt's samples this is, from 0.
        prompt: the prompt as given: text, or None where token ids were given.
        text: the generated text, without the stop string that may have ended it.
        output: what the scheduler knows: token ids, finish reason, counts and times.
    """

    index: int
    sample: int
    prompt: str | None
    text: str
    output: RequestOutput

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated token ids."""
        return self.output.token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why generation ended."""
        return self.output.finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.output.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache supplied, not computed again."""
        return self.output.num_cached_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens."""
        return self.output.num_generated_tokens

    @property
    def prompt_logprobs(self) -> tuple[float | None, ...] | None:
        """Log-probability of each prompt token given those before it, where
        `SamplingParams(prompt_logprobs=True)` asked for them; None for the first token.
        """
        return self.output.prompt_logprobs

    @property
    def error(self) -> str | None:
        """What went wrong, where the finish reason is ERROR."""
        return self.output.error


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of one request's text as it becomes certain.

    Attributes:
        index: the prompt's place in the call.
        sample: which of the prompt's samples this is, from 0.
        text: the new text; empty only in a last chunk (there is no chunk while a character or a
            possible stop string is incomplete).
        completion: the whole answer, with the request's last chunk; None before.
    """

    index: int
    sample: int
    text: str
    completion: Completion | None = None
