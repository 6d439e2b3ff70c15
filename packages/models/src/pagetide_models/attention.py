"""Attention over the paged KV cache: project, rotate, write to the cache, read back from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
        self.shape = options.attention_shape(config)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend with q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; like q."""
        self._check_shapes(q, k, v, metadata)
        layer, shape = kv_cache.layer(self.layer_index), self.shape
        scales = {"k_scales": layer.k_scales, "v_scales": layer.v_scales}
        # Straight to the back end: the entries of `pagetide_kernels` would look at the cache and
        # the step again in every layer, and `CausalLM.forward` has.
        self.backend.store_kv(k, v, layer.k, layer.v, metadata, shape, **scales)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.backend.paged_attention(
            q,
            layer.k,
            layer.v,
            metadata,
            shape,
            scale=self.scale,
            window=self.window,
            soft_cap=None,
            out=out,
            **scales,
        )
        return out

    def _check_shapes(self, q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        shape, num_tokens = self.shape, metadata.num_tokens
        q_shape = (num_tokens, shape.num_heads, shape.head_dim)
        kv_shape = (num_tokens, shape.num_kv_heads, shape.head_dim)
        for name, x, wanted in (("q", q, q_shape), ("k", k, kv_shape), ("v", v, kv_shape)):
            if x.shape != wanted or x.dtype != shape.query_dtype or x.stride(-1) != 1:
                raise ValueError(
                    f"{name} is {x.dtype} {list(x.shape)} with strides {list(x.stride())}; layer "
                    f"{self.layer_index} attends with {shape.query_dtype} {list(wanted)}, "
                    "stride 1 along head_dim"
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
        self.head_dim = config.head_dim
        self.sizes = [config.q_size, config.kv_size, config.kv_size]
        self.qk_v_heads = [config.num_heads + config.num_kv_heads, config.num_kv_heads]
        self.q_k_heads = [config.num_heads, config.num_kv_heads]
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
        heads = self.qkv(x).view(len(x), sum(self.qk_v_heads), self.head_dim)
        qk, v = heads.split_with_sizes(self.qk_v_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes(self.q_k_heads, dim=1)
            qk = torch.cat((self.q_norm.normalise(q), self.k_norm.normalise(k)), dim=1)
        if self.rotary is not None:
            qk = self.rotary(qk, positions)
        q, k = qk.split_with_sizes(self.q_k_heads, dim=1)
        attended: Tensor = self.cached(q, k, v, kv_cache, metadata)
        output: Tensor = self.output(attended.flatten(1))
        return output
