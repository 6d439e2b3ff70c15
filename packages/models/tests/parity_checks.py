"""What a full-size model must pass against transformers in fp32: whole, cut and decoded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from pagetide_kernels import AttentionMetadata
from pagetide_kvcache import KVCache
from pagetide_models import CausalLM, load_model
from pagetide_models.parity import compare_traces, trace_model, trace_transformers
from pagetide_models.parity.compare import compare_logits

BLOCK_SIZE = 16
LOGIT_BOUND = 1e-3
HIDDEN_BOUND = 1e-4
HALF_CACHE_BOUND = 5e-3  # of log-probabilities, with an fp16 KV pool


def save_random(folder: Path, config: Any) -> Any:
    """Build transformers' model of a configuration with seeded weights, and save it."""
    torch.set_num_threads(1)
    torch.manual_seed(20)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones and biases as zeros: tell them apart
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Pair:
    """Ours and transformers' of the same weights, both in fp32.

    Attributes:
        text: What prompts are cut from; None: random tokens. Real weights want real text: on random
            tokens they reach, once in 500 positions, states in which fp32 rounding alone moves
            transformers' own logits by 3e-3 from those it computes in fp64.
    """

    ours: CausalLM
    theirs: Any
    text: Sequence[int] | None = None
    references: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        if self.text is not None:
            start = (7 * length + 13 * seed) % (len(self.text) - length + 1)
            return list(self.text[start : start + length])
        generator = random.Random(1000 * length + seed)
        return [generator.randrange(self.ours.config.vocab_size) for _ in range(length)]

    def reference(self, token_ids: Sequence[int]) -> Any:
        """transformers' logits of all positions; those of short prompts are kept."""
        key = tuple(token_ids)
        if key in self.references:
            return self.references[key]
        with torch.no_grad():
            logits = self.theirs(torch.tensor([token_ids]), use_cache=False).logits[0]
        if len(key) <= 21:
            self.references[key] = logits
        return logits

    def check_lengths(self, lengths: Iterable[int]) -> None:
        """All-position and last-position logits of prompts, all in one batch of ours."""
        prompts = [self.prompt(length) for length in lengths]
        close = 0
        for prompt, actual in zip(prompts, batch_logits(self.ours, prompts), strict=True):
            difference = compare_logits(actual, self.reference(prompt))
            assert difference.largest <= LOGIT_BOUND, len(prompt)
            assert difference.first_different is None, len(prompt)
            close += difference.num_close
        total = sum(map(len, prompts))
        assert close <= 0.01 * total, f"{close} of {total} positions are too close to call"

    def check_layers(self, length: int) -> None:
        """The hidden state after each layer, whole and in chunks, and the tool's own verdict."""
        prompt = self.prompt(length, seed=1)
        theirs = trace_transformers(self.theirs, prompt)
        for chunks in ([length], [length // 2, length - length // 2 - 2, 1, 1]):
            comparison = compare_traces(
                trace_model(self.ours, prompt, chunks), theirs, HIDDEN_BOUND
            )
            assert comparison.place is None
            assert len(comparison.hidden_errors) == self.ours.config.num_layers + 2
            assert max(comparison.hidden_errors.values()) <= HIDDEN_BOUND

    def check_cuts(self, run_paged: Any, length: int, num_random: int) -> None:
        """Whole prompt, token by token and random chunks: transformers' logits at each position."""
        prompt = self.prompt(length, seed=2)
        expected = self.reference(prompt)
        whole = self.ours.compute_logits(run_paged(self.ours, prompt, [length]))
        for chunks in [[1] * length, *random_chunks(length, num_random)]:
            logits = self.ours.compute_logits(run_paged(self.ours, prompt, chunks))
            assert float((logits - whole).abs().max()) <= LOGIT_BOUND
            difference = compare_logits(logits, expected)
            assert difference.largest <= LOGIT_BOUND
            assert difference.first_different is None

    def check_half_cache(self, path: Path, lengths: Iterable[int]) -> None:
        """fp32 weights with an fp16 KV pool: log-probabilities close to those without rounding."""
        model = load_model(path, kv_dtype="float16", block_size=BLOCK_SIZE)
        assert (model.dtype, model.kv_cache_spec.kv_dtype) == (torch.float32, "float16")
        prompts = [self.prompt(length) for length in lengths]
        for prompt, actual in zip(prompts, batch_logits(model, prompts), strict=True):
            difference = compare_logits(actual, self.reference(prompt))
            assert difference.largest_log_probability <= HALF_CACHE_BOUND, len(prompt)

    def check_half_cache_of_real_weights(self, path: Path, lengths: Iterable[int]) -> None:
        """The same where rounding keys and values alone moves transformers beyond that bound.

        Its log-probabilities move by up to 0.018 when its keys and values are rounded to fp16; ours
        may not move further than that, over all tokens of the vocabulary, by mean or by maximum.
        """
        model = load_model(path, kv_dtype="float16", block_size=BLOCK_SIZE)
        prompts = [self.prompt(length) for length in lengths]
        ours, rounded = [], []
        for prompt, actual in zip(prompts, batch_logits(model, prompts), strict=True):
            exact = self.reference(prompt).log_softmax(-1)
            theirs = trace_transformers(self.theirs, prompt, kv_dtype="float16")["logits"]
            ours.append((actual.log_softmax(-1) - exact).abs())
            rounded.append((theirs.log_softmax(-1) - exact).abs())
        assert float(torch.cat(ours).mean()) <= 1.2 * float(torch.cat(rounded).mean())
        assert float(torch.cat(ours).max()) <= 1.5 * float(torch.cat(rounded).max())


def batch_logits(model: CausalLM, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Logits of all positions of several prompts, computed in one step over scattered blocks."""
    lengths = [len(prompt) for prompt in prompts]
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = list(range(sum(counts)))
    random.Random(0).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    metadata = AttentionMetadata.from_host(
        lengths, lengths, tables, block_size=BLOCK_SIZE, num_blocks=sum(counts)
    )
    hidden = model(
        torch.tensor([token for prompt in prompts for token in prompt]),
        torch.cat([torch.arange(length) for length in lengths]),
        KVCache(model.kv_cache_spec, sum(counts)),
        metadata,
    )
    return [model.compute_logits(part) for part in hidden.split(lengths)]


def random_chunks(length: int, count: int) -> list[list[int]]:
    """Ways of cutting a prompt, the block boundary among the cuts and on either side of it."""
    cuts = [[15, 2, length - 17], [16, length - 16], [17, length - 17]]
    generator = random.Random(5)
    while len(cuts) < count:
        ends = sorted({generator.randrange(1, length) for _ in range(5)} | {length})
        cuts.append([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return cuts[:count]
