"""Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagetide_models import CausalLM
from pagetide_runtime.input_buffers import StepInputs
from pagetide_scheduler import PromptLogprobs, StepPlan

__all__ = ["PromptScorer", "PromptScores"]

# Rows of logits that exist at once: [tokens, vocab_size] of a long prompt would be gigabytes.
_ROWS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What one step scored: `values` on the device, and which tokens they belong to.

    Attributes:
        values: float32 `[N]`, one part after the other.
        parts: of each part the sequence's index in the plan, its first position, its length.
    """

    values: Tensor
    parts: tuple[tuple[int, int, int], ...]

    def on_host(self, values: Tensor) -> tuple[PromptLogprobs, ...]:
        """The scores as the scheduler takes them; `values` are these, copied to the host."""
        column = values.numpy()
        scores, start = [], 0
        for sequence, position, count in self.parts:
            scores.append(PromptLogprobs(sequence, position, column[start : start + count]))
            start += count
        return tuple(scores)


class PromptScorer:
    """Scores the prompts of the rows that asked for `prompt_logprobs`.

    A token's log-probability comes from the hidden state of the token before it. Where a chunk
    ends within the prompt its last hidden state is kept, a row each, for the next chunk's first
    token.

    Args:
        num_rows: rows of device state.
    """

    def __init__(self, num_rows: int) -> None:
        self._prompt_lens = np.zeros(num_rows, np.int64)  # 0 for rows that did not ask
        self._last_hidden: list[Tensor | None] = [None] * num_rows

    def initialise_rows(self, plan: StepPlan) -> None:
        """Takes over whether the rows that `plan` gives ask for scores."""
        for index, params in enumerate(plan.new_params):
            row = int(plan.new_rows[index])
            # The first position at which a row may end lies `min_tokens` behind its prompt.
            prompt_len = int(plan.new_min_positions[index]) - params.min_tokens
            self._prompt_lens[row] = prompt_len if params.prompt_logprobs else 0
            self._last_hidden[row] = None

    def score(
        self, model: CausalLM, hidden: Tensor, plan: StepPlan, inputs: StepInputs
    ) -> PromptScores | None:
        """Scores the prompt tokens that `plan` computes, where they were asked for.

        Args:
            model: computes logits, float32.
            hidden: `[num_tokens, hidden_size]`, what the model made of the plan's tokens.
            plan: the step.
            inputs: its columns on the device.

        Returns:
            The scores, or None if nobody asked.
        """
        prompt_lens = self._prompt_lens[plan.rows]
        if not np.count_nonzero(prompt_lens):
            return None
        starts = plan.seq_lens - np.diff(plan.query_start_loc)
        values: list[Tensor] = []
        parts: list[tuple[int, int, int]] = []
        for sequence in np.flatnonzero(starts < prompt_lens).tolist():
            row, start = int(plan.rows[sequence]), int(starts[sequence])
            count = min(int(plan.seq_lens[sequence]), int(prompt_lens[sequence])) - start
            first = int(plan.query_start_loc[sequence])
            before = hidden[first : first + count - 1]  # the tokens before those that are scored
            targets = inputs.token_ids[first : first + count]
            last = self._last_hidden[row]
            if start == 0:  # the first token follows nothing
                targets = targets[1:]
            elif last is not None:
                before = torch.cat((last, before))
            else:
                raise ValueError(f"row {row} begins at position {start}, without what precedes it")
            is_done = start + count == int(prompt_lens[sequence])
            self._last_hidden[row] = None if is_done else hidden[first + count - 1, None].clone()
            if len(targets):
                values += _logprobs(model, before, targets.long())
                parts.append((sequence, max(start, 1), len(targets)))
        return PromptScores(torch.cat(values), tuple(parts)) if parts else None


def _logprobs(model: CausalLM, hidden: Tensor, targets: Tensor) -> list[Tensor]:
    """Log-probability of each target given the hidden state before it, a piece at a time."""
    pieces = []
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        logits = model.compute_logits(hidden[rows])
        chosen = logits.gather(1, targets[rows, None])[:, 0]
        pieces.append(chosen - logits.logsumexp(dim=1))
    return pieces
