"""One plan on the device: upload, copies, forward, sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagetide_kernels import copy_blocks
from pagetide_kvcache import KVCache
from pagetide_models import CausalLM
from pagetide_runtime.input_buffers import InputBuffers, StepInputs
from pagetide_runtime.prompt_scorer import PromptScorer, PromptScores
from pagetide_runtime.sampler import Sampler
from pagetide_scheduler import PromptLogprobs, SampleError, StepPlan, StepResult

__all__ = ["ModelRunner", "StepHandle"]

_UNSOUND = "the model's logits were not finite (NaN or infinity)"


class StepHandle:
    """A submitted step; `result()` is the only place where the host waits for the device."""

    def __init__(
        self, tokens: Tensor, is_sound: Tensor, scores: PromptScores | None = None
    ) -> None:
        self._event: torch.cuda.Event | None = None
        self._scores = scores
        self._score_values = scores.values if scores is not None else None
        if tokens.is_cuda:
            tokens = _to_pinned(tokens)
            is_sound = _to_pinned(is_sound)
            if scores is not None:
                self._score_values = _to_pinned(scores.values)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._tokens, self._is_sound = tokens, is_sound

    @classmethod
    def of_nothing(cls, device: torch.device, scores: PromptScores | None = None) -> StepHandle:
        """The handle of a step that samples nothing: copies alone, or the middle of prompts."""
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return cls(nothing, nothing.bool(), scores)

    def result(self) -> StepResult:
        """Waits for the step and returns what it sampled, one token a sample."""
        if self._event is not None:
            self._event.synchronize()
        unsound = np.flatnonzero(~self._is_sound.numpy()).tolist()
        scored: tuple[PromptLogprobs, ...] = ()
        if self._scores is not None and self._score_values is not None:
            scored = self._scores.on_host(self._score_values)
        return StepResult.of(
            self._tokens.numpy(),
            errors=tuple(SampleError(index, _UNSOUND) for index in unsound),
            prompt_logprobs=scored,
        )


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class ModelRunner:
    """Runs plans in order on one stream; holds the device's state and nothing of the requests.

    Args:
        model: the model, on its device.
        kv_cache: the pool that the plans' block ids name.
        num_rows: rows of the device state, the scheduler's `max_num_seqs`.
        max_model_len: tokens a request may reach; fixes the block tables' width.
        eos_token_ids: what `min_tokens` keeps from being sampled too early.
        host_cache: the pool that swapped blocks go to, if the scheduler swaps.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        *,
        num_rows: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        host_cache: KVCache | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.host_cache = host_cache
        block_size = kv_cache.spec.block_size
        self._buffers = InputBuffers(
            num_rows, -(-max_model_len // block_size), block_size, model.device
        )
        self._sampler = Sampler(num_rows, eos_token_ids, model.device)
        self._prompt_scorer = PromptScorer(num_rows)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts a plan's work and returns at once (on a CPU: when it is done).

        What a plan names runs in its own order: copies, rows, block tables, tokens, samples.
        """
        buffers = self._buffers
        inputs = StepInputs.upload(plan, self.model.device)
        if plan.copies:
            copy_blocks(
                self.kv_cache,
                plan.copies,
                backend=self.model.backend,
                host_cache=self.host_cache,
            )
        self._sampler.initialise_rows(plan)
        self._prompt_scorer.initialise_rows(plan)
        buffers.apply_table_deltas(inputs)
        if not plan.num_tokens:
            return StepHandle.of_nothing(self.model.device)
        hidden = self.model(
            buffers.input_ids(inputs),
            inputs.positions,
            self.kv_cache,
            buffers.metadata(plan, inputs),
        )
        scores = self._prompt_scorer.score(self.model, hidden, plan, inputs)
        if not plan.num_samples:
            return StepHandle.of_nothing(self.model.device, scores)
        logits = self.model.compute_logits(hidden[inputs.sample_tokens])
        tokens, is_sound = self._sampler.sample(logits, plan, inputs)
        buffers.last_tokens[inputs.sample_rows] = tokens.int()
        return StepHandle(tokens, is_sound, scores)

    def is_usable(self) -> bool:
        """Whether the device still answers; after a sticky CUDA error it never does again."""
        if self.model.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self.model.device)
        except RuntimeError:
            return False
        return True
