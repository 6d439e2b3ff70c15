"""A causal language model as a pure function. T are the tokens of a step, S the sampled rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pagetide_kernels import AttentionMetadata
from pagetide_kvcache import KVCache, KVCacheSpec
from pagetide_models.attention import Attention
from pagetide_models.config import ModelConfig
from pagetide_models.layers import Embedding, Linear, Norm
from pagetide_models.options import BuildOptions

__all__ = ["BuildOptions", "CausalLM", "DecoderLayer"]


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP around one residual stream.

    The residual addition is left to the next norm, which fuses the two: hence two tensors in and
    out.
    """

    def __init__(
        self, *, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        update: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Take and return what is still to be added to the residual, and the residual."""
        normed, residual = self.attention_norm(update, residual)
        attended = self.attention(normed, positions, kv_cache, metadata)
        normed, residual = self.mlp_norm(attended, residual)
        return self.mlp(normed), residual


class CausalLM(nn.Module):
    """A built model: embedding, decoder layers, final norm and vocabulary head.

    It holds nothing but weights and choices made at load; `forward` reads and writes only its
    arguments, so one instance serves any number of caches.

    Attributes:
        config: What it is.
        dtype: Of weights and hidden states.
        device: Where it is.
        kv_cache_spec: The KV cache it must be given.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: BuildOptions,
        *,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Linear,
        position_embedding: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = options.dtype
        self.device = options.device
        self.kv_cache_spec: KVCacheSpec = options.kv_cache_spec
        self.backend = options.backend
        self.attention_shape = options.attention_shape(config)
        self.embedding = embedding
        self.position_embedding = position_embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head = head

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Compute the hidden states of a step's tokens and write their K and V to the cache.

        Args:
            input_ids: int32 or int64 [T], each below ``config.vocab_size``.
            positions: int32 or int64 [T], each below ``config.max_position_embeddings``.
            kv_cache: Shaped by `kv_cache_spec`; its blocks named in `metadata` are written.
            metadata: Which tokens belong to which sequence and block. Prepared here for the back
                end if it has no work list yet.

        Returns:
            [T, hidden_size] in `dtype`, after the final norm.

        Raises:
            ValueError: The cache has another layout than `kv_cache_spec`.
        """
        if kv_cache.spec != self.kv_cache_spec:
            raise ValueError(
                f"kv_cache has {kv_cache.spec}, but the model was loaded for {self.kv_cache_spec}; "
                "make the cache from model.kv_cache_spec"
            )
        if metadata.work_list is None:
            metadata = self.backend.prepare(metadata, self.attention_shape)
        update = self.embedding(input_ids)
        if self.position_embedding is not None:
            update = update + self.position_embedding(positions)
        residual: Tensor | None = None
        for layer in self.layers:
            update, residual = layer(update, residual, positions, kv_cache, metadata)
        hidden, _ = self.norm(update, residual)
        return hidden

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Project the rows that are sampled from.

        Args:
            hidden: [S, hidden_size] in `dtype`, rows of what `forward` returned.

        Returns:
            float32 [S, vocab_size]: a view that leaves out the head's padding.
        """
        logits: Tensor = self.head(hidden)
        return logits[:, : self.config.vocab_size].float()
