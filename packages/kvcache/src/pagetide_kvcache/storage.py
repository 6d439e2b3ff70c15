"""The device tensors of a KV cache: the only module of this package that needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagetide_kvcache.spec import KVCacheSpec

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":  # torch is there but broken: its own message says more
        raise
    raise ModuleNotFoundError(
        "KVCache stores its blocks in torch tensors and torch is not installed: "
        'pip install "pagetide-kvcache[torch]"',
        name="torch",
    ) from error

__all__ = ["KVCache", "LayerKVCache"]

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int8-block": torch.int8,
}


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """One layer's keys and values: views, so writing them writes the cache.

    Attributes:
        k: `[num_blocks, num_kv_heads, block_size, head_dim]`, KV dtype. The padding is cut off:
            the stride from slot to slot is `padded_head_dim`, from element to element 1.
        v: as `k`.
        k_scales: float32 `[num_blocks, num_kv_heads, block_size]`, or None when not quantized.
            For `int8-block` the stride along the slots is 0: one scale seen from every slot.
        v_scales: as `k_scales`.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None


class KVCache:
    """The tensors of `num_blocks` blocks, zero at first.

    Attributes:
        spec: their layout.
        num_blocks: blocks in the pool.
        data: KV dtype `[num_layers, 2, num_blocks, num_kv_heads, block_size, padded_head_dim]`.
        scales: float32 `[num_layers, 2, num_blocks, num_kv_heads, block_size]` (last dimension 1
            for `int8-block`), or None when not quantized. A scale of 0 reads as zeros.

    Args:
        spec: the layout.
        num_blocks: blocks in the pool, at least 1.
        device: where the tensors lie.
        pin_memory: page-lock them, so that copies to and from a GPU need not wait for the host: for
            the host pool that blocks are swapped to. Needs a GPU, and `device="cpu"`.

    Raises:
        ValueError: `num_blocks` is below 1, or `pin_memory` is asked of memory of a device.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} must be at least 1")
        if pin_memory and torch.device(device).type != "cpu":
            raise ValueError(
                f"pin_memory=True pins host memory, and device={str(device)!r} is not the host: "
                'give device="cpu" or leave pin_memory out'
            )
        place: dict[str, Any] = {"device": device, "pin_memory": pin_memory}
        self.spec = spec
        self.num_blocks = num_blocks
        self.data = torch.zeros(
            spec.data_shape(num_blocks), dtype=_TORCH_DTYPES[spec.kv_dtype], **place
        )
        self.scales: torch.Tensor | None = None
        if spec.is_quantized:
            self.scales = torch.zeros(spec.scale_shape(num_blocks), dtype=torch.float32, **place)
        self._layers = tuple(self._view_layer(index) for index in range(spec.num_layers))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.data.device

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, scales included: `num_blocks * spec.bytes_per_block`."""
        scales = self.scales
        return self.data.nbytes + (0 if scales is None else scales.nbytes)

    def layer(self, index: int) -> LayerKVCache:
        """The views of one layer; the same object each time.

        Raises:
            IndexError: there is no such layer.
        """
        if not 0 <= index < len(self._layers):
            raise IndexError(f"index={index}: the cache has {len(self._layers)} layer(s)")
        return self._layers[index]

    def _view_layer(self, index: int) -> LayerKVCache:
        k, v = self.data[index, :, ..., : self.spec.head_dim].unbind(0)
        if self.scales is None:
            return LayerKVCache(k, v, None, None)
        scales = self.scales[index].expand(-1, -1, -1, self.spec.block_size)
        return LayerKVCache(k, v, *scales.unbind(0))
