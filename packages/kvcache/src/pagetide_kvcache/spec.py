"""The layout contract of a KV cache, in numbers: needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["KVCacheSpec", "KVDType"]

KVDType = Literal["float32", "float16", "bfloat16", "int8", "int8-block"]
"""How keys and values are stored. `int8` keeps a float32 scale a token and head, written once;
`int8-block` a scale a block and head, which a larger token makes the whole block requantise to."""

HEAD_DIM_MULTIPLE: Final = 16
SCALE_BYTES: Final = 4

_ELEMENT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int8-block": 1}


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What a model's keys and values look like in the cache.

    Attributes:
        num_layers: attention layers.
        num_kv_heads: key/value heads a layer.
        head_dim: elements a head, as the model has them.
        block_size: tokens a block.
        kv_dtype: how they are stored.

    Raises:
        ValueError: a number is below 1 or `kv_dtype` is none of `KVDType`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    kv_dtype: KVDType = "float16"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.kv_dtype not in _ELEMENT_BYTES:
            raise ValueError(f"kv_dtype={self.kv_dtype!r} must be one of {get_args(KVDType)}")

    @property
    def padded_head_dim(self) -> int:
        """Elements a head as stored: `head_dim` rounded up to a multiple of 16."""
        return -(-self.head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE

    @property
    def is_quantized(self) -> bool:
        """Whether scales are stored beside the elements."""
        return self.kv_dtype in ("int8", "int8-block")

    @property
    def element_size(self) -> int:
        """Bytes of one stored element."""
        return _ELEMENT_BYTES[self.kv_dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys, values and scales of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self._tile_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in a full block (whole unless the scales are a block's)."""
        return self.bytes_per_block / self.block_size

    @property
    def _tile_bytes(self) -> int:
        """Bytes of one (block, head) tile of K or of V, its scales included."""
        elements = self.block_size * self.padded_head_dim * self.element_size
        return elements + self._scales_per_tile * SCALE_BYTES

    @property
    def _scales_per_tile(self) -> int:
        if not self.is_quantized:
            return 0
        return 1 if self.kv_dtype == "int8-block" else self.block_size

    def data_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """`[num_layers, 2, num_blocks, num_kv_heads, block_size, padded_head_dim]`, K before V.

        One (block, head) tile is contiguous.
        """
        return (
            self.num_layers,
            2,
            num_blocks,
            self.num_kv_heads,
            self.block_size,
            self.padded_head_dim,
        )

    def scale_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """`[num_layers, 2, num_blocks, num_kv_heads, block_size]`; the last is 1 for int8-block.

        Raises:
            ValueError: this dtype has no scales.
        """
        if not self.is_quantized:
            raise ValueError(f"kv_dtype={self.kv_dtype!r} has no scales: ask is_quantized first")
        return (self.num_layers, 2, num_blocks, self.num_kv_heads, self._scales_per_tile)

    def num_blocks_for(self, num_bytes: int) -> int:
        """The most blocks that fit in `num_bytes`."""
        if num_bytes < 0:
            raise ValueError(f"num_bytes={num_bytes} must not be negative")
        return num_bytes // self.bytes_per_block
