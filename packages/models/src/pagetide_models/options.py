"""What a model is built with: choices made once at load and handed to every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from pagetide_kernels import AttentionBackend, AttentionShape
from pagetide_kvcache import KVCacheSpec
from pagetide_models.config import CheckpointDType, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BuildOptions", "dtype_candidates"]

_DTYPES: Final = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How the parameters are held and how attention is computed.

    Attributes:
        dtype: Of parameters and activations.
        device: Where they are.
        kv_cache_spec: The layout of the KV cache the model will be given.
        backend: The attention back end, chosen once for the model's shape.
    """

    dtype: torch.dtype
    device: torch.device
    kv_cache_spec: KVCacheSpec
    backend: AttentionBackend

    def unset(self, *shape: int) -> Tensor:
        """A parameter's storage before loading: NaN, so that an omission shows in the output."""
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def attention_shape(self, config: ModelConfig) -> AttentionShape:
        """The shape that `backend` was chosen for."""
        return AttentionShape.of_cache(
            self.kv_cache_spec, num_heads=config.num_heads, query_dtype=self.dtype
        )


def dtype_candidates(
    dtype: str | torch.dtype, checkpoint: CheckpointDType, device: torch.device
) -> tuple[torch.dtype, ...]:
    """The dtypes to try, first the one to compute in.

    ``auto`` is float32 on the CPU whatever the checkpoint holds: CPU cores have fast fp32 products
    and mostly emulate 16-bit ones, and quantised weights are dequantised into it without a second
    rounding. On a GPU it follows the checkpoint, except that bfloat16 needs compute capability 8.0:
    below it the model is held in float16, and in float32 if a weight lies beyond float16's range.

    Raises:
        ValueError: `dtype` is neither ``auto`` nor float32, float16 or bfloat16.
    """
    if isinstance(dtype, torch.dtype):
        if dtype in _DTYPES.values():
            return (dtype,)
    elif dtype in _DTYPES:
        return (_DTYPES[dtype],)
    if dtype != "auto":
        raise ValueError(f"dtype {dtype!r} is none of auto, {', '.join(_DTYPES)}")
    if device.type != "cuda":
        return (torch.float32,)
    # Not is_bf16_supported(): it answers True on older cards, where bf16 is emulated.
    if checkpoint == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        return (torch.float16, torch.float32)
    return (_DTYPES[checkpoint],)
