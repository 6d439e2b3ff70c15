"""A causal language model as a pure function. T are the tokens of a step, S the sampled rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pagetide_kernels import AttentionMetadata
from pagetide_kvcache import KVCache, KVCacheSpec
from pagetide_models.attention import Attention
from pagetide_models.config import ModelConfig
from pagetide_models.layers import (
    MLP,
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    Norm,
    PositionEmbedding,
    RMSNorm,
    vocab_head,
)
from pagetide_models.options import BuildOptions
from pagetide_models.rope import RotaryEmbedding

__all__ = ["BuildOptions", "CausalLM", "DecoderLayer", "compose_decoder"]


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
        position_embedding: PositionEmbedding | None = None,
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
            ValueError: The cache has another layout than `kv_cache_spec`, the arguments are of
                different steps or devices, or a sequence is longer than the context.
        """
        self._check_step(input_ids, positions, kv_cache, metadata)
        self._check_context(positions, metadata)
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

    def _check_step(
        self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> None:
        # Once for all layers, which hand what they are given straight to the back end.
        if kv_cache.spec != self.kv_cache_spec:
            raise ValueError(
                f"kv_cache has {kv_cache.spec}, but the model was loaded for {self.kv_cache_spec}; "
                "make the cache from model.kv_cache_spec"
            )
        if metadata.block_size != self.kv_cache_spec.block_size:
            raise ValueError(
                f"metadata is of blocks of {metadata.block_size} tokens, but the cache's have "
                f"{self.kv_cache_spec.block_size}"
            )
        for name, tensor in (("input_ids", input_ids), ("positions", positions)):
            if tensor.shape != (metadata.num_tokens,):
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, but metadata is of a step of "
                    f"{metadata.num_tokens} tokens"
                )
        device = self.embedding.weight.device
        for name, place in (("kv_cache", kv_cache.device), ("metadata", metadata.device)):
            if place != device:
                raise ValueError(f"{name} is on {place}, but the model is on {device}")

    def _check_context(self, positions: Tensor, metadata: AttentionMetadata) -> None:
        # On a GPU a table read beyond its end is a device assert: every later call would fail too.
        # The bound is the host's; only on the CPU can the positions themselves be looked at.
        length = metadata.bounds.max_seq_len
        if positions.device.type == "cpu" and len(positions):
            length = max(length, int(positions.max()) + 1)
        if length > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {length} tokens is beyond the model's context of "
                f"{self.config.max_position_embeddings}; cut the prompt"
            )

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


def compose_decoder(
    config: ModelConfig,
    options: BuildOptions,
    *,
    norm: type[RMSNorm] | type[LayerNorm] = RMSNorm,
    mlp: type[GatedMLP] | type[MLP] = GatedMLP,
) -> CausalLM:
    """Compose a pre-norm decoder: positions rotate where the configuration says so, else learned.

    Args:
        config: The model.
        options: How its parameters are held.
        norm: Of attention, MLP and the end.
        mlp: The layers' MLP.
    """
    size, eps = config.hidden_size, config.norm_eps
    rotary = RotaryEmbedding(config, options.device) if config.rotary_dim else None
    embedding = Embedding(config.vocab_size, size, options)
    layers = [
        DecoderLayer(
            attention_norm=norm(size, eps, options),
            attention=Attention(config, index, rotary, options),
            mlp_norm=norm(size, eps, options),
            mlp=mlp(config, options),
        )
        for index in range(config.num_layers)
    ]
    return CausalLM(
        config,
        options,
        embedding=embedding,
        position_embedding=None if rotary is not None else PositionEmbedding(config, options),
        layers=layers,
        norm=norm(size, eps, options),
        head=vocab_head(config, embedding, options),
    )
