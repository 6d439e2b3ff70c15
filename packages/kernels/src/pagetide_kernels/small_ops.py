"""The small operations between the large ones: norms, rotary embedding, gated activations.

Each computes in float32 inside and rounds once to its input's dtype, on any device. None looks at
any row but its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagetide_kernels.validation import require_tensor

__all__ = [
    "add_rms_norm",
    "gelu_tanh",
    "layer_norm",
    "rms_norm",
    "rotary",
    "rotary_table",
    "silu_and_mul",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` of each row (arXiv:1910.07467).

    Args:
        x: [..., hidden].
        weight: [hidden], of ``x``'s dtype.
        eps: added to the mean square.
    """
    require_tensor("weight", weight, x.shape[-1:], x.dtype, x.device)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum.

    Args:
        x: [..., hidden].
        residual: like ``x``; not changed.
        weight: [hidden], of ``x``'s dtype.
        eps: added to the mean square.

    Returns:
        The normalised sum and the sum, which is the new residual.
    """
    require_tensor("residual", residual, x.shape, x.dtype, x.device)
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` of each row (arXiv:1607.06450).

    Args:
        x: [..., hidden].
        weight: [hidden], of ``x``'s dtype.
        bias: like ``weight``.
        eps: added to the variance.
    """
    require_tensor("weight", weight, x.shape[-1:], x.dtype, x.device)
    require_tensor("bias", bias, x.shape[-1:], x.dtype, x.device)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotary_table(cos: Tensor, sin: Tensor) -> Tensor:
    """What `rotary` multiplies by: of each position the cosines twice, then -sines and sines.

    Build it from float64 angles: one rounded to a 16-bit float is wrong by whole radians at
    position 2,000.

    Args:
        cos: [max_position, rotary_dim / 2], cosines of the angles.
        sin: like ``cos``, sines.

    Returns:
        float32 [max_position, 2, 1, rotary_dim].
    """
    require_tensor("sin", sin, cos.shape, cos.dtype, cos.device)
    halves = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
    return halves.float().unsqueeze(2)


def rotary(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate heads by their positions, half-split (arXiv:2104.09864, GPT-NeoX's layout).

    Dimension ``i`` of the first half of the rotated part pairs with dimension ``i`` of its second
    half; dimensions beyond ``rotary_dim`` pass through.

    Args:
        x: [T, heads, head_dim]; queries and keys side by side cost one call.
        positions: int32 or int64 [T].
        table: float32 [max_position, 2, 1, rotary_dim], from `rotary_table`.

    Returns:
        The rotated heads, a new tensor like ``x``.
    """
    require_tensor("positions", positions, x.shape[:1], None, x.device)
    require_tensor("table", table, (table.shape[0], 2, 1, table.shape[-1]), torch.float32, x.device)
    rotary_dim, head_dim = table.shape[-1], x.shape[-1]
    if rotary_dim > head_dim:
        raise ValueError(f"table rotates {rotary_dim} dimensions; a head has {head_dim}")
    if rotary_dim < head_dim:
        rotated = rotary(x[..., :rotary_dim], positions, table)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    cos, sin = table.index_select(0, positions).unbind(1)
    x32 = x.float()
    return (x32 * cos).addcmul_(x32.roll(rotary_dim // 2, dims=-1), sin).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of a fused projection (SwiGLU, arXiv:2002.05202).

    Args:
        x: [..., 2 x intermediate], the gate first, then up.

    Returns:
        [..., intermediate].
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns; gate and up need an even number")
    gate, up = x.chunk(2, dim=-1)
    if x.dtype == torch.float32:
        return functional.silu(gate).mul_(up)
    return functional.silu(gate.float()).mul_(up).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula, GPT-2's activation (arXiv:1606.08415).

    Args:
        x: any shape.
    """
    return functional.gelu(x, approximate="tanh")
