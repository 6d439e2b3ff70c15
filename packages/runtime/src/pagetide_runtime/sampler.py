"""Sampling state by row, and one draw a sampled row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagetide_kernels import greedy, sample
from pagetide_runtime.input_buffers import StepInputs
from pagetide_scheduler import StepPlan

__all__ = ["Sampler"]


class Sampler:
    """Each row's wishes, kept on the host and the device alike.

    The host copy answers, without asking the device, whether a step is all greedy and which rows
    must not end yet; the device copy is what the draw reads.
    """

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.ones(num_rows, np.float32)
        self._keys = np.zeros(num_rows, np.int64)
        # Before this position the row's ends are masked (min_tokens); 0 for a row that has none.
        self._min_end_position = np.zeros(num_rows, np.int64)
        self._ends: dict[int, list[int]] = {}
        self._device_state: list[Tensor] = [
            torch.from_numpy(column).to(device, copy=True)
            for column in (self._temperature, self._top_k, self._top_p, self._keys)
        ]

    def initialise_rows(self, plan: StepPlan) -> None:
        """Takes over the parameters and random keys of the rows that `plan` gives."""
        if not len(plan.new_rows):
            return
        new_rows = zip(plan.new_rows.tolist(), plan.new_params, strict=True)
        for index, (row, params) in enumerate(new_rows):
            self._temperature[row] = params.temperature
            self._top_k[row] = params.top_k
            self._top_p[row] = params.top_p
            self._keys[row] = plan.new_keys[index].astype(np.int64)
            self._min_end_position[row] = plan.new_min_positions[index]
            ends = () if params.ignore_eos else self._eos_token_ids
            self._ends[row] = [*ends, *params.stop_token_ids]
        rows = plan.new_rows.tolist()
        host: list[npt.NDArray[Any]] = [self._temperature, self._top_k, self._top_p, self._keys]
        for state, column in zip(self._device_state, host, strict=True):
            state[rows] = torch.from_numpy(column[rows]).to(state.device)

    def sample(self, logits: Tensor, plan: StepPlan, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Draws one token for each of the plan's samples.

        Args:
            logits: float32 `[num_samples, vocab_size]`; masked in place for `min_tokens`.
            plan: names each sample's row and the absolute position of the token it draws.
            inputs: the plan's columns on the device.

        Returns:
            Token ids int64 `[num_samples]`, and bool `[num_samples]`: whether the row's logits
            have a finite maximum: no NaN, no +inf, not all -inf (where not, its token id means
            nothing).
        """
        rows, positions = plan.sample_rows, plan.sample_positions
        self._mask_ends(logits, rows, positions)
        if not self._temperature[rows].any():
            tokens = greedy(logits)
            # It names the NaN where there is one, so a second pass over the logits can be spared.
            return tokens, logits.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()
        is_sound = logits.amax(dim=-1).isfinite()
        temperature, top_k, top_p, keys = (
            state[inputs.sample_rows] for state in self._device_state
        )
        tokens = sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            keys=keys,
            positions=inputs.sample_positions.long(),
        )
        return tokens, is_sound

    def _mask_ends(
        self, logits: Tensor, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> None:
        too_early = np.flatnonzero(positions < self._min_end_position[rows])
        for index in too_early.tolist():
            # A stop token beyond the vocabulary can never be drawn: nothing to mask.
            ends = [end for end in self._ends[int(rows[index])] if end < logits.shape[1]]
            if ends:
                logits[index, ends] = -torch.inf
