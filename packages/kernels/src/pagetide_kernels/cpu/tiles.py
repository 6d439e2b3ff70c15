"""Gathering a paged cache's (block, head) tiles into order, as float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Scratch", "Tiles"]


class Scratch:
    """Buffers that one step's gathers reuse: fresh ones would cost page faults in every layer."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype], Tensor] = {}  # the last taken: layers ask alike

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until ``name`` is taken again with the same dtype."""
        key = (name, dtype)
        view = self._views.get(key)
        if view is None or view.shape != shape:
            num_elements = math.prod(shape)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < num_elements:
                buffer = self._buffers[key] = torch.empty(num_elements, dtype=dtype)
            view = self._views[key] = buffer[:num_elements].view(shape)
        return view


class Tiles:
    """A layer's K or V cache as (block, head) tiles, gathered by tile id into float32."""

    def __init__(self, cache: Tensor, scales: Tensor | None, scratch: Scratch) -> None:
        self._cache = cache
        self._scales = scales
        self._scratch = scratch

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache."""
        return self._cache.shape[1]

    def gather(self, name: str, tile_ids: Tensor, num_rows: int, padding_ids: Tensor) -> Tensor:
        """The tiles of each row in order, float32 [num_rows, keys, head_dim], 0 at ``padding_ids``.

        It stays valid until ``name`` is gathered again.
        """
        _, _, block_size, head_dim = self._cache.shape
        shape = (len(tile_ids), block_size, head_dim)
        tiles = self._scratch.take(name, shape, self._cache.dtype)
        _select(self._cache, tile_ids, tiles)
        if self._scales is None and len(padding_ids):
            tiles.view(-1, head_dim).index_fill_(0, padding_ids, 0)
        if tiles.dtype != torch.float32:
            tiles = self._scratch.take(name, shape, torch.float32).copy_(tiles)
        if self._scales is not None:
            scales = self._scratch.take("scales", shape[:2], torch.float32)
            _select(self._scales, tile_ids, scales)
            # An int8 is always finite: a zero scale clears whatever the padding holds.
            scales.view(-1).index_fill_(0, padding_ids, 0)
            tiles.mul_(scales.unsqueeze(-1))
        return tiles.view(num_rows, -1, head_dim)


def _select(cache: Tensor, tile_ids: Tensor, out: Tensor) -> None:
    """``out[i] = cache[block, head]`` of ``tile_ids[i] = block * num_kv_heads + head``."""
    num_kv_heads = cache.shape[1]
    if cache.stride(0) == num_kv_heads * cache.stride(1):
        torch.index_select(cache.flatten(0, 1), 0, tile_ids, out=out)
    else:
        out.copy_(cache[tile_ids // num_kv_heads, tile_ids % num_kv_heads])
