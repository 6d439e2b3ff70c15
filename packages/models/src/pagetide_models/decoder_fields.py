"""Configuration keys that decoders share, as config.json and as GGUF files write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from pagetide_models.config import CheckpointDType
from pagetide_models.errors import ModelFormatError, UnsupportedModelError
from pagetide_models.fields import Fields
from pagetide_models.rope_config import rope_from_gguf, rope_from_json
from pagetide_models.tensors import TensorInfo

__all__ = [
    "gguf_common_fields",
    "gguf_decoder_fields",
    "json_common_fields",
    "json_decoder_fields",
    "json_layer_windows",
]

_DTYPES: Final[dict[str, CheckpointDType]] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float32",
}
_SIZES: Final = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}


def json_common_fields(
    fields: Fields, *, sizes: Mapping[str, str] = _SIZES, default_tie: bool = False
) -> dict[str, Any]:
    """The `ModelConfig` arguments that every config.json gives the same way.

    Args:
        fields: The file.
        sizes: How it calls `hidden_size`, `num_layers`, `num_heads`, `max_position_embeddings`.
        default_tie: Whether the head is tied where the file does not say.
    """
    if fields.section("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{fields.path}: quantised safetensors (quantization_config) are not supported; "
            "use the original checkpoint or a GGUF file"
        )
    shape = {name: fields.integer(key) for name, key in sizes.items()}
    if shape["num_heads"] < 1:
        raise fields.fail(sizes["num_heads"], f"is {shape['num_heads']}")
    vocab_size = fields.integer("vocab_size")
    pad = fields.token_id("pad_token_id")
    return {
        **shape,
        "vocab_size": vocab_size,
        "head_dim": shape["hidden_size"] // shape["num_heads"],
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default_tie),
        "dtype": _DTYPES.get(
            fields.text("dtype", fields.text("torch_dtype", "float32")), "float32"
        ),
        "bos_token_id": fields.token_id("bos_token_id"),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        # Padding is never computed here; files whose pad id lies beyond the vocabulary exist.
        "pad_token_id": pad if pad is not None and pad < vocab_size else None,
    }


def json_decoder_fields(
    fields: Fields, *, default_tie: bool = False, default_head_dim: int | None = None
) -> dict[str, Any]:
    """The `ModelConfig` arguments that every Llama-like config.json gives the same way."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{fields.path}: hidden_act {activation!r} is not supported")
    common = json_common_fields(fields, default_tie=default_tie)
    head_dim = fields.integer("head_dim", default_head_dim or common["head_dim"])
    theta, scaling = rope_from_json(fields, common["max_position_embeddings"])
    return {
        **common,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_kv_heads": fields.integer("num_key_value_heads", common["num_heads"]),
        "head_dim": head_dim,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rotary_dim": head_dim,
        "rope_scaling": scaling,
    }


def json_layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Each layer's sliding window as Qwen's config.json says it; empty: none anywhere.

    Layers from ``max_window_layers`` on have the window, unless ``layer_types`` names them.
    """
    if not fields.boolean("use_sliding_window", False):
        return ()
    is_absent = "sliding_window" not in fields.values
    window = 4096 if is_absent else fields.optional_integer("sliding_window")
    if window is None:  # written as null
        return ()
    num_layers, first = fields.integer("num_hidden_layers"), fields.integer("max_window_layers", 28)
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(window if index >= first else None for index in range(num_layers))
    windows = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or not all(kind in windows for kind in kinds):
        raise fields.fail("layer_types", f"should be a list of {', '.join(windows)}")
    return tuple(windows[kind] for kind in kinds)


def gguf_common_fields(fields: Fields, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The `ModelConfig` arguments that every GGUF file gives the same way.

    Args:
        fields: The metadata, its prefix set to ``"<architecture>."``.
        tensors: The file's tensors: the vocabulary's size and a tied head show in them.
    """
    tokens = Fields(fields.values, fields.path, "tokenizer.ggml.")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(f"{fields.path}: missing tensor 'token_embd.weight'")
    vocab_size = embedding.shape[0]
    if fields.integer("vocab_size", vocab_size) != vocab_size:
        raise fields.fail("vocab_size", f"differs from the {vocab_size} rows of token_embd.weight")
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    if num_heads < 1:
        raise fields.fail("attention.head_count", f"is {num_heads}")
    eos = (tokens.token_id("eos_token_id"), tokens.token_id("eot_token_id"))
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": fields.integer("block_count"),
        "num_heads": num_heads,
        "head_dim": fields.integer("attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": fields.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _gguf_dtype(tensors),
        "bos_token_id": tokens.token_id("bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(id_ for id_ in eos if id_ is not None)),
        "pad_token_id": tokens.token_id("padding_token_id"),
    }


def gguf_decoder_fields(fields: Fields, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The `ModelConfig` arguments that every Llama-like GGUF file gives the same way."""
    common = gguf_common_fields(fields, tensors)
    head_dim = common["head_dim"]
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{fields.path}: key and value heads differ in length")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{fields.path}: rotating {rotary_dim} of {head_dim} dimensions is not supported"
        )
    theta, scaling = rope_from_gguf(fields, tensors, rotary_dim)
    window = fields.optional_integer("attention.sliding_window")
    is_windowed = window is not None and 0 < window < common["max_position_embeddings"]
    return {
        **common,
        "num_kv_heads": fields.integer("attention.head_count_kv", common["num_heads"]),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rotary_dim": rotary_dim,
        "rope_scaling": scaling,
        "layer_windows": (window,) * common["num_layers"] if is_windowed else (),
    }


def _gguf_dtype(tensors: Mapping[str, TensorInfo]) -> CheckpointDType:
    """The type of most matrices; quantised ones have 16-bit scales and count as float16."""
    matrices = Counter(info.encoding for info in tensors.values() if len(info.shape) > 1)
    most_common = matrices.most_common(1)[0][0]
    return {"F32": "float32", "BF16": "bfloat16"}.get(most_common, "float16")  # type: ignore[return-value]
