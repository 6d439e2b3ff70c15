"""Rotary frequencies and their cosine and sine tables, in float64 until the last rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import pagetide_kernels as kernels
from pagetide_models.config import ModelConfig, RopeScaling

__all__ = ["RotaryEmbedding", "inverse_frequencies"]


def inverse_frequencies(theta: float, rotary_dim: int, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each rotated pair: float64 [rotary_dim / 2].

    Sources: RoPE (arXiv:2104.09864); linear scaling (arXiv:2306.15595); YaRN (arXiv:2309.00071);
    the llama3 rule as published with the Llama 3.1 weights. `dynamic` equals the unscaled
    frequencies up to the original context, which is all that is supported of it.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    frequencies = theta**-exponents
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.frequency_factors, dtype=torch.float64)
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    return _yarn(frequencies, theta, rotary_dim, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, long ones are stretched, those between are interpolated."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, theta: float, rotary_dim: int, scaling: RopeScaling) -> Tensor:
    """As llama3, but the band is a ramp over the index of the pair."""

    def index_turning(times: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = index_turning(scaling.beta_fast), index_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # the published rule's guard against dividing by zero
    index = torch.arange(rotary_dim // 2, dtype=torch.float64)
    stretched = ((index - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - stretched + stretched / scaling.factor)


class RotaryEmbedding:
    """Cosines and sines of every position, shared by all layers.

    Not a module: converting a model to 16 bits must not convert these (at position 2,000 an angle
    in half precision is off by whole radians).

    Attributes:
        table: float32, see `pagetide_kernels.rotary_table`; times YaRN's attention factor.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        theta = 10_000.0 if config.rope_theta is None else config.rope_theta
        scaling = config.rope_scaling
        frequencies = inverse_frequencies(theta, config.rotary_dim, scaling)
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
        angles = torch.outer(positions, frequencies)
        factor = 1.0 if scaling is None else scaling.attention_factor
        table = kernels.rotary_table(angles.cos() * factor, angles.sin() * factor)
        self.table = table.to(device)

    @property
    def cos(self) -> Tensor:
        """float32 [max_position_embeddings, rotary_dim / 2], a view."""
        return self.table[:, 0, 0, : self.table.shape[-1] // 2]

    @property
    def sin(self) -> Tensor:
        """Like `cos`."""
        return self.table[:, 1, 0, self.table.shape[-1] // 2 :]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [T, heads, head_dim] by its positions [T]; a new tensor."""
        return kernels.rotary(x, positions, self.table)
