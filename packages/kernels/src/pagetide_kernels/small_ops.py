"""The small operations between the large ones: norms, rotary embedding, gated activations.

Each computes in float32 inside and rounds once to its input's dtype, on any device. None looks at
any row but its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagetide_kernels.validation import require_tensor

__all__ = ["add_rms_norm", "gelu_tanh", "layer_norm", "rms_norm", "rotary", "silu_and_mul"]


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


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, half-split (arXiv:2104.09864, GPT-NeoX's layout).

    Dimension ``i`` of the first half of the rotated part pairs with dimension ``i`` of its second
    half; dimensions beyond ``rotary_dim`` pass through. Build the tables from float64 angles: an
    angle rounded to a 16-bit float is wrong by whole radians at position 2,000.

    Args:
        q: [T, num_heads, head_dim].
        k: [T, num_kv_heads, head_dim], of ``q``'s dtype.
        positions: int32 or int64 [T].
        cos: float32 [max_position, rotary_dim / 2], cosines of the angles.
        sin: like ``cos``, sines.

    Returns:
        The rotated q and k, new tensors.
    """
    num_tokens, _, head_dim = q.shape
    require_tensor("k", k, (num_tokens, None, head_dim), q.dtype, q.device)
    require_tensor("positions", positions, (num_tokens,), None, q.device)
    require_tensor("cos", cos, (None, None), torch.float32, q.device)
    require_tensor("sin", sin, cos.shape, torch.float32, q.device)
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"cos has {cos.shape[1]} columns, which rotate {2 * cos.shape[1]} dimensions; "
            f"a head has {head_dim}"
        )
    cos = cos.index_select(0, positions).unsqueeze(1)
    sin = sin.index_select(0, positions).unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    x32 = x.float()
    first, second = x32[..., :half], x32[..., half : 2 * half]
    rotated = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        rotated[..., 2 * half :] = x32[..., 2 * half :]
    return rotated.to(x.dtype)


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
