"""Attention over the paged KV cache: project, rotate, write to the cache, read back from it."""

from __future__ import annotations

from torch import Tensor, nn

import pagetide_kernels as kernels
from pagetide_kernels import AttentionMetadata
from pagetide_kvcache import KVCache
from pagetide_models.config import ModelConfig
from pagetide_models.layers import Linear, RMSNorm
from pagetide_models.options import BuildOptions
from pagetide_models.rope import RotaryEmbedding

__all__ = ["Attention", "CachedAttention"]


class CachedAttention(nn.Module):
    """Store this step's K and V, then attend; K and V are read from the cache and nowhere else.

    So a token sees the same bytes whether its keys were computed in this step, an earlier one or
    for another request.
    """

    def __init__(self, config: ModelConfig, layer_index: int, options: BuildOptions) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.scale = config.head_dim**-0.5
        self.window = config.window(layer_index)
        self.backend = options.backend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend with q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; like q."""
        layer = kv_cache.layer(self.layer_index)
        kernels.store_kv(
            k,
            v,
            layer.k,
            layer.v,
            metadata,
            k_scales=layer.k_scales,
            v_scales=layer.v_scales,
            backend=self.backend,
        )
        return kernels.paged_attention(
            q,
            layer.k,
            layer.v,
            metadata,
            scale=self.scale,
            k_scales=layer.k_scales,
            v_scales=layer.v_scales,
            window=self.window,
            backend=self.backend,
        )


class Attention(nn.Module):
    """Grouped-query attention with fused projections and, where given, rotary positions."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        rotary: RotaryEmbedding | None,
        options: BuildOptions,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.sizes = [config.q_size, config.kv_size, config.kv_size]
        self.qkv = Linear(config.hidden_size, sum(self.sizes), options, bias=config.qkv_bias)
        self.output = Linear(config.q_size, config.hidden_size, options, bias=config.output_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, options)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, options)
        self.rotary = rotary
        self.cached = CachedAttention(config, layer_index, options)

    def forward(
        self, x: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """x [T, hidden] and positions [T] to [T, hidden]."""
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.normalise(q), self.k_norm.normalise(k)
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        attended: Tensor = self.cached(q, k, v, kv_cache, metadata)
        output: Tensor = self.output(attended.flatten(1))
        return output
