"""The layers that architectures are composed of. Notation: T tokens of a step.

Parameters are allocated as NaN and filled by the loader; none needs a gradient.
"""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor, nn
from torch.nn import functional

import pagetide_kernels as kernels
from pagetide_models.config import ModelConfig
from pagetide_models.options import BuildOptions

__all__ = [
    "MLP",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "Norm",
    "PositionEmbedding",
    "RMSNorm",
    "vocab_head",
]

VOCAB_MULTIPLE: Final = (
    64  # matrix products want whole tiles: 50,257 columns are slower than 50,304
)


def _parameter(storage: Tensor) -> nn.Parameter:
    return nn.Parameter(storage, requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias``: weight [out_features, in_features], bias [out_features] or None."""

    def __init__(
        self, in_features: int, out_features: int, options: BuildOptions, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = _parameter(options.unset(out_features, in_features))
        self.bias = _parameter(options.unset(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Token ids [T] to rows [T, hidden] of a table, padded to a multiple of 64 rows with zeros.

    The padding serves the vocabulary head that shares the table. An id inside it reads zeros
    instead of failing: `ModelConfig.check_token_ids` is for whoever accepts ids.
    """

    def __init__(self, vocab_size: int, hidden_size: int, options: BuildOptions) -> None:
        super().__init__()
        self.num_padding_rows = -vocab_size % VOCAB_MULTIPLE
        self.weight = _parameter(_padded_rows(vocab_size, hidden_size, options))

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)


class PositionEmbedding(nn.Module):
    """Learned positions [T] to rows [T, hidden]. No padding: beyond the context is an error."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        self.weight = _parameter(options.unset(config.max_position_embeddings, config.hidden_size))

    def forward(self, positions: Tensor) -> Tensor:
        return functional.embedding(positions, self.weight)


def _padded_rows(vocab_size: int, hidden_size: int, options: BuildOptions) -> Tensor:
    table = options.unset(vocab_size + -vocab_size % VOCAB_MULTIPLE, hidden_size)
    table[vocab_size:] = 0
    return table


class _Head(Linear):
    """A vocabulary head: its rows beyond the vocabulary are zeros."""

    def __init__(self, config: ModelConfig, weight: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self.num_padding_rows = weight.shape[0] - config.vocab_size
        self.weight = weight
        self.bias = None


def vocab_head(config: ModelConfig, embedding: Embedding, options: BuildOptions) -> Linear:
    """The projection from hidden [S, hidden] to padded logits [S, multiple of 64].

    A tied head is the embedding's own parameter, so it cannot be left unset or differ.
    """
    if config.tie_word_embeddings:
        return _Head(config, embedding.weight)
    table = _padded_rows(config.vocab_size, config.hidden_size, options)
    return _Head(config, _parameter(table))


class Norm(Protocol):
    """A normalisation that first adds what the layer before computed."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``norm(x + residual)`` and ``x + residual``; both [T, hidden]."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32 inside."""

    def __init__(self, size: int, eps: float, options: BuildOptions) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(options.unset(size))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.normalise(x), x
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def normalise(self, x: Tensor) -> Tensor:
        """The norm alone: [..., size] to the same."""
        return kernels.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm with bias over the last dimension, in float32 inside."""

    def __init__(self, size: int, eps: float, options: BuildOptions) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(options.unset(size))
        self.bias = _parameter(options.unset(size))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return kernels.layer_norm(total, self.weight, self.bias, self.eps), total


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up as one product."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(hidden, 2 * inner, options, bias=bias)
        self.down = Linear(inner, hidden, options, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(kernels.silu_and_mul(self.gate_up(x)))
        return output


class MLP(nn.Module):
    """``down(gelu_tanh(up(x)))``."""

    def __init__(self, config: ModelConfig, options: BuildOptions) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up = Linear(hidden, inner, options, bias=bias)
        self.down = Linear(inner, hidden, options, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(kernels.gelu_tanh(self.up(x)))
        return output


def num_padding_rows(module: nn.Module) -> int:
    """How many rows of a module's weight are padding, which no checkpoint fills."""
    return int(getattr(module, "num_padding_rows", 0))
