"""The tensor names that Llama, Mistral, Qwen2 and Qwen3 share, in safetensors and in GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagetide_models.config import ModelConfig
from pagetide_models.layout import CheckpointFormat, Layout, Weight
from pagetide_models.rope_config import ROPE_FACTORS_TENSOR
from pagetide_models.tensors import TensorInfo

__all__ = ["decoder_layout"]

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
