"""RMSNorm on the CPU in four operations, where PyTorch composes it of eight.

A decode step of a small model is hundreds of tiny operations between the products, and each costs
the same few microseconds whatever it computes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pagetide_models.layers import RMSNorm

__all__ = ["LengthNorm", "replace_rms_norms"]


class LengthNorm(nn.Module):
    """An `RMSNorm` by the length of a row: float32 [..., size] to the same.

    With ``|x|`` the length, ``x / sqrt(mean(x^2) + eps) * weight`` equals
    ``x * (weight * sqrt(size)) / hypot(|x|, sqrt(size * eps))``, whose constants are made at load.
    """

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        size = norm.weight.shape[0]
        self.scaled_weight = norm.weight.detach() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * norm.eps))

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        return self.normalise(total), total

    def normalise(self, x: Tensor) -> Tensor:
        """The norm alone."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self.scaled_weight).div_(length.hypot_(self.floor))


def replace_rms_norms(model: nn.Module) -> None:
    """Replace every float32 `RMSNorm` on the CPU by a `LengthNorm`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (
                isinstance(child, RMSNorm)
                and child.weight.device.type == "cpu"
                and child.weight.dtype == torch.float32
            ):
                setattr(parent, name, LengthNorm(child))
