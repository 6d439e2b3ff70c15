"""What a model is: sizes, options and special tokens, normalised once and never changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["Activation", "CheckpointDType", "ModelConfig", "RopeKind", "RopeScaling"]

CheckpointDType = Literal["float32", "float16", "bfloat16"]
Activation = Literal["silu", "gelu_tanh"]
RopeKind = Literal["linear", "dynamic", "llama3", "yarn", "factors"]

_POSITIVE: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
_LARGEST: Final = 1 << 31  # every size is an int32 somewhere


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are changed to reach a longer context.

    Attributes:
        kind: The rule. ``factors`` divides each frequency by a number of its own (GGUF files
            store the llama3 rule that way).
        factor: How many times longer the context became.
        original_max_position_embeddings: The context the model was first trained with
            (`llama3`, `yarn`, `dynamic`).
        low_freq_factor, high_freq_factor: The band of `llama3`.
        beta_fast, beta_slow, truncate: The band of `yarn`, and whether it is rounded outwards.
        attention_factor: What cosines and sines are multiplied with (`yarn`).
        frequency_factors: The divisors of `factors`, ``rotary_dim / 2`` of them.
    """

    kind: RopeKind
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ValueError(f"rope scaling {self.kind!r} is none of {get_args(RopeKind)}")
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor {self.factor} is not positive")
        if self.kind in ("llama3", "yarn", "dynamic") and self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope scaling {self.kind!r} needs original_max_position_embeddings, "
                f"got {self.original_max_position_embeddings}"
            )
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"rope scaling 'llama3' needs high_freq_factor {self.high_freq_factor} > "
                f"low_freq_factor {self.low_freq_factor} > 0"
            )
        if not all(factor > 0 for factor in self.frequency_factors):
            raise ValueError("rope frequency_factors must all be positive")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture and limits of a model, from config.json or from GGUF keys.

    Attributes:
        architecture: The registered name, as in config.json's ``model_type``.
        vocab_size: Token ids are 0..vocab_size-1.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP.
        num_layers, num_heads, num_kv_heads, head_dim: Shape of the attention;
            ``num_heads`` is a multiple of ``num_kv_heads``.
        max_position_embeddings: The context: positions are 0..max_position_embeddings-1.
        norm_eps: Epsilon of RMSNorm or LayerNorm.
        rope_theta: Base of the rotary frequencies; None where positions are learned.
        rotary_dim: How many leading dimensions of a head rotate; 0 where none do.
        rope_scaling: The context extension, or None.
        activation: Of the MLP; ``silu`` is gated.
        qkv_bias, output_bias, mlp_bias: Which projections have a bias.
        qk_norm: Whether RMSNorm is applied to each head of q and k before rotation.
        layer_windows: A sliding window (in tokens) or None for each layer; empty: none anywhere.
        tie_word_embeddings: Whether the vocabulary head is the embedding table.
        dtype: What the checkpoint's weights are stored as (quantised ones count as float16).
        bos_token_id, eos_token_ids, pad_token_id: From the file's own keys.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float | None = 10_000.0
    rotary_dim: int = 0
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    tie_word_embeddings: bool = False
    dtype: CheckpointDType = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value < _LARGEST:
                raise ValueError(f"{name} must be an integer from 1 to 2^31-1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if not 0 <= self.norm_eps < 1:
            raise ValueError(f"norm_eps must be from 0 to 1, got {self.norm_eps!r}")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be even and at most head_dim {self.head_dim}, "
                f"got {self.rotary_dim}"
            )
        if self.rotary_dim and not (self.rope_theta is not None and self.rope_theta > 0):
            raise ValueError(f"rope_theta must be positive, got {self.rope_theta!r}")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers"
            )
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise ValueError(f"sliding windows must be positive, got {self.layer_windows}")
        if self.dtype not in get_args(CheckpointDType):
            raise ValueError(f"dtype {self.dtype!r} is none of {get_args(CheckpointDType)}")
        special = (self.bos_token_id, self.pad_token_id, *self.eos_token_ids)
        for token_id in special:
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"special token id {token_id} is outside the vocabulary of {self.vocab_size}"
                )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads (or all value heads) together."""
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, in tokens, or None."""
        return self.layer_windows[layer] if self.layer_windows else None

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Raise `ValueError` naming the first id outside the vocabulary.

        The embedding table is padded, so an id just beyond ``vocab_size`` would read padding
        instead of failing: whoever accepts ids from outside calls this first.
        """
        if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < self.vocab_size):
            index, token_id = next(
                (index, token_id)
                for index, token_id in enumerate(token_ids)
                if not 0 <= token_id < self.vocab_size
            )
            raise ValueError(
                f"token id {token_id} at index {index} is outside the vocabulary: "
                f"ids are 0..{self.vocab_size - 1}"
            )
