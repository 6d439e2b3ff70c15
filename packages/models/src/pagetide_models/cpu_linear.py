"""Linear layers on the CPU with weights packed once for oneDNN: up to three times as fast.

`F.linear` hands oneDNN a plain weight, which it lays out anew for each product. The two operators
that keep the packed layout are private to PyTorch, so this module is the only one that calls them,
tries them before it relies on them, and leaves the layers alone where they are missing or wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagetide_models.layers import Linear

__all__ = ["PackedLinear", "can_pack", "pack_linears"]

# oneDNN multiplies this many rows in about a tenth less time than one, two or three (measured with
# AVX-512; the weights are read once either way), so fewer are repeated.
_FAST_ROWS: Final = 6


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return result


@lru_cache(maxsize=1)
def can_pack() -> bool:
    """Whether the packed product exists here and agrees with `F.linear`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 40, generator=generator)
    bias = torch.randn(96, generator=generator)
    try:
        packed = _pack(weight)
        for rows in (1, 3):
            x = torch.randn(rows, 40, generator=generator)
            if not torch.allclose(
                _linear(x, packed, bias), functional.linear(x, weight, bias), atol=1e-4
            ):
                return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


class PackedLinear(nn.Module):
    """A `Linear` whose weight lives in oneDNN's layout; float32 [T, in] to [T, out]."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.out_features = linear.weight.shape[0]
        self.packed = _pack(linear.weight)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows == 0:
            return x.new_empty(0, self.out_features)
        if num_rows > _FAST_ROWS // 2:
            return _linear(x, self.packed, self.bias)
        repeated = torch.cat((x,) * (_FAST_ROWS // num_rows))
        return _linear(repeated, self.packed, self.bias)[:num_rows]


def pack_linears(model: nn.Module) -> None:
    """Replace every float32 `Linear` on the CPU by a `PackedLinear`, freeing its weight.

    A tied vocabulary head gets a packed copy; the embedding keeps the plain table to look up in.
    Does nothing to models of another dtype or device, or where `can_pack` is false.
    """
    if not can_pack():
        return
    # Parents only: a list that held the linears would keep every plain weight until the end.
    parents = [module for module in model.modules() if not isinstance(module, Linear)]
    for parent in parents:
        for name in [name for name, _ in parent.named_children()]:
            child = getattr(parent, name)
            if isinstance(child, Linear) and _is_packable(child.weight):
                setattr(parent, name, PackedLinear(child))


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32
