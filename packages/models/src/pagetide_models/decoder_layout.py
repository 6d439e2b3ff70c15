"""What the Llama-like decoders share in their files: configuration keys and tensor names.

Llama, Mistral, Qwen2 and Qwen3 write the same keys and names; what differs is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from pagetide_models.config import CheckpointDType, ModelConfig
from pagetide_models.errors import ModelFormatError, UnsupportedModelError
from pagetide_models.fields import Fields
from pagetide_models.layout import CheckpointFormat, Layout, Weight
from pagetide_models.rope_config import ROPE_FACTORS_TENSOR, rope_from_gguf, rope_from_json
from pagetide_models.tensors import TensorInfo

__all__ = ["decoder_layout", "gguf_decoder_fields", "json_decoder_fields"]

_DTYPES: dict[str, CheckpointDType] = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float64": "float32",
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def json_decoder_fields(
    fields: Fields, *, default_tie: bool = False, default_head_dim: int | None = None
) -> dict[str, Any]:
    """The `ModelConfig` arguments that every Llama-like config.json gives the same way."""
    if fields.section("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{fields.path}: quantised safetensors (quantization_config) are not supported; "
            "use the original checkpoint or a GGUF file"
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{fields.path}: hidden_act {activation!r} is not supported")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if num_heads < 1:
        raise fields.fail("num_attention_heads", f"is {num_heads}")
    head_dim = fields.integer("head_dim", default_head_dim or hidden_size // num_heads)
    max_positions = fields.integer("max_position_embeddings")
    theta, scaling = rope_from_json(fields, max_positions)
    vocab_size = fields.integer("vocab_size")
    pad = fields.token_id("pad_token_id")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rotary_dim": head_dim,
        "rope_scaling": scaling,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default_tie),
        "dtype": _DTYPES.get(
            fields.text("dtype", fields.text("torch_dtype", "float32")), "float32"
        ),
        "bos_token_id": fields.token_id("bos_token_id"),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        # Padding is never computed here; files whose pad id lies beyond the vocabulary exist.
        "pad_token_id": pad if pad is not None and pad < vocab_size else None,
    }


def gguf_decoder_fields(fields: Fields, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The `ModelConfig` arguments that every Llama-like GGUF file gives the same way.

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
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{fields.path}: key and value heads differ in length")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModelError(
            f"{fields.path}: rotating {rotary_dim} of {head_dim} dimensions is not supported"
        )
    theta, scaling = rope_from_gguf(fields, tensors, rotary_dim)
    eos = (tokens.token_id("eos_token_id"), tokens.token_id("eot_token_id"))
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": fields.integer("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rotary_dim": rotary_dim,
        "rope_scaling": scaling,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _gguf_dtype(tensors),
        "bos_token_id": tokens.token_id("bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(id_ for id_ in eos if id_ is not None)),
        "pad_token_id": tokens.token_id("padding_token_id"),
    }


def _gguf_dtype(tensors: Mapping[str, TensorInfo]) -> CheckpointDType:
    """The type of most matrices; quantised ones have 16-bit scales and count as float16."""
    matrices = Counter(info.encoding for info in tensors.values() if len(info.shape) > 1)
    most_common = matrices.most_common(1)[0][0]
    return {"F32": "float32", "BF16": "bfloat16"}.get(most_common, "float16")  # type: ignore[return-value]


def decoder_layout(
    config: ModelConfig,
    checkpoint_format: CheckpointFormat,
    tensors: Mapping[str, TensorInfo],
    *,
    has_paired_rotary_rows: bool,
) -> Layout:
    """The tensors of a Llama-like decoder; q, k, v and gate, up are fused into one parameter each.

    Args:
        config: The model; its flags say which biases and norms there are.
        checkpoint_format: Which naming the file follows.
        tensors: The file's tensors (only to know which ignorable ones it carries).
        has_paired_rotary_rows: Whether this architecture's GGUF files hold q and k reordered.
    """
    is_gguf = checkpoint_format == "gguf"
    weights = tuple(_weights(config, is_gguf, is_gguf and has_paired_rotary_rows))
    tied_head = None
    if config.tie_word_embeddings:
        tied_head, weights = weights[-1], weights[:-1]
    ignored = {name for name in tensors if name.endswith(".rotary_emb.inv_freq")}
    if is_gguf:
        ignored.add(ROPE_FACTORS_TENSOR)  # read into the configuration
    return Layout(weights, frozenset(ignored), tied_head)


def _weights(config: ModelConfig, is_gguf: bool, is_paired: bool) -> Iterator[Weight]:
    hidden, inner = config.hidden_size, config.intermediate_size

    def name(prefix: str, stem: str, kind: str) -> str:
        if is_gguf:
            return f"{prefix.replace('model.layers', 'blk')}{_GGUF_NAMES[stem]}.{kind}"
        return f"{prefix}{stem}.{kind}"

    def linear(
        prefix: str,
        stem: str,
        rows: int,
        columns: int,
        parameter: str,
        has_bias: bool,
        first_row: int = 0,
        heads: int = 0,
    ) -> Iterator[Weight]:
        yield Weight(
            name(prefix, stem, "weight"),
            (rows, columns),
            f"{parameter}.weight",
            first_row,
            rotary_heads=heads,
        )
        if has_bias:
            yield Weight(
                name(prefix, stem, "bias"),
                (rows,),
                f"{parameter}.bias",
                first_row,
                rotary_heads=heads,
            )

    def vector(prefix: str, stem: str, size: int, parameter: str) -> Weight:
        return Weight(name(prefix, stem, "weight"), (size,), f"{parameter}.weight")

    q_heads, k_heads = (config.num_heads, config.num_kv_heads) if is_paired else (0, 0)
    q_size, kv_size = config.q_size, config.kv_size
    yield from linear("", "model.embed_tokens", config.vocab_size, hidden, "embedding", False)
    for index in range(config.num_layers):
        prefix, target = f"model.layers.{index}.", f"layers.{index}"
        attention, mlp = f"{target}.attention", f"{target}.mlp"
        qkv, bias = f"{attention}.qkv", config.qkv_bias
        yield vector(prefix, "input_layernorm", hidden, f"{target}.attention_norm")
        yield from linear(prefix, "self_attn.q_proj", q_size, hidden, qkv, bias, heads=q_heads)
        yield from linear(
            prefix, "self_attn.k_proj", kv_size, hidden, qkv, bias, q_size, heads=k_heads
        )
        yield from linear(prefix, "self_attn.v_proj", kv_size, hidden, qkv, bias, q_size + kv_size)
        if config.qk_norm:
            yield vector(prefix, "self_attn.q_norm", config.head_dim, f"{attention}.q_norm")
            yield vector(prefix, "self_attn.k_norm", config.head_dim, f"{attention}.k_norm")
        yield from linear(
            prefix, "self_attn.o_proj", hidden, q_size, f"{attention}.output", config.output_bias
        )
        yield vector(prefix, "post_attention_layernorm", hidden, f"{target}.mlp_norm")
        gate_up, bias = f"{mlp}.gate_up", config.mlp_bias
        yield from linear(prefix, "mlp.gate_proj", inner, hidden, gate_up, bias)
        yield from linear(prefix, "mlp.up_proj", inner, hidden, gate_up, bias, inner)
        yield from linear(prefix, "mlp.down_proj", hidden, inner, f"{mlp}.down", bias)
    yield vector("", "model.norm", hidden, "norm")
    yield from linear("", "lm_head", config.vocab_size, hidden, "head", False)
