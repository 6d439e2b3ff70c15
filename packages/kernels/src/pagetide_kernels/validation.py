"""Checks that run before any kernel does: each names the argument, its value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

__all__ = [
    "require_int",
    "require_no_overlap",
    "require_own_memory",
    "require_tensor",
    "require_unit_stride",
]


def require_int(name: str, value: object, *, at_least: int) -> None:
    """Raise ValueError unless ``value`` is an integer (not a bool) of ``at_least`` or more."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {at_least}")


def require_tensor(
    name: str,
    value: Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Raise unless ``value`` is a tensor of this shape (None: any size), dtype and device.

    Raises:
        TypeError: not a tensor.
        ValueError: a tensor, but of another shape, dtype or device.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    actual = value.shape
    # Most checks name every size: one comparison settles those.
    if actual != shape and (
        len(actual) != len(shape)
        or any(want is not None and want != got for want, got in zip(shape, actual, strict=False))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(actual)}; it must be [{wanted}]")
    if dtype is not None and value.dtype != dtype:
        raise ValueError(f"{name} has dtype {value.dtype}; it must be {dtype}: convert it first")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; it must be on {device}, like the rest")


def require_unit_stride(name: str, value: Tensor) -> None:
    """Raise ValueError unless neighbours along the last dimension are neighbours in memory."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {value.stride(-1)} along its last dimension; it must be 1: "
            "call .contiguous(), or permute other dimensions only"
        )


def require_own_memory(name: str, value: Tensor, **others: Tensor) -> None:
    """Raise ValueError if ``value`` begins where one of ``others`` does, which is still read."""
    for other, tensor in others.items():
        if value.numel() and value.data_ptr() == tensor.data_ptr():
            raise ValueError(
                f"{name} is the memory of {other}, which is read after {name} is first written: "
                "give it memory of its own"
            )


def require_no_overlap(name: str, value: Tensor) -> None:
    """Raise ValueError if ``value`` is expanded: a write to one element would change others."""
    if 0 in value.stride() and any(
        stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)
    ):
        raise ValueError(
            f"{name} is an expanded view (strides {list(value.stride())}); it is written to, "
            "so give it memory of its own"
        )
