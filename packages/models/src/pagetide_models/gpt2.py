"""The GPT-2 architecture: learned positions, LayerNorm, biases everywhere and a GELU MLP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pagetide_models.config import ModelConfig
from pagetide_models.decoder_fields import gguf_common_fields, json_common_fields
from pagetide_models.errors import UnsupportedModelError
from pagetide_models.fields import Fields
from pagetide_models.layout import CheckpointFormat, Layout, Weight
from pagetide_models.registry import Architecture
from pagetide_models.tensors import TensorInfo

if TYPE_CHECKING:
    from pagetide_models.decoder import BuildOptions, CausalLM

__all__ = ["ARCHITECTURE"]

_SIZES: Final = {"hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head",
                 "max_position_embeddings": "n_positions"}  # fmt: skip
_EXPECTED: Final = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
                    "add_cross_attention": False}  # fmt: skip
_MASK_BUFFER: Final = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")


def _config(shape: dict[str, Any], eps: float) -> ModelConfig:
    return ModelConfig(
        architecture="gpt2", num_kv_heads=shape["num_heads"], norm_eps=eps, rope_theta=None,
        activation="gelu_tanh", qkv_bias=True, output_bias=True, mlp_bias=True, **shape,
    )  # fmt: skip


def config_from_json(fields: Fields) -> ModelConfig:
    if fields.text("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise UnsupportedModelError(f"{fields.path}: only GELU's tanh formula is supported")
    for key, expected in _EXPECTED.items():
        if fields.boolean(key, expected) != expected:
            raise UnsupportedModelError(f"{fields.path}: {key} {not expected} is not supported")
    shape = json_common_fields(fields, sizes=_SIZES, default_tie=True)
    shape["intermediate_size"] = fields.integer("n_inner", 4 * shape["hidden_size"])
    return _config(shape, fields.number("layer_norm_epsilon", 1e-5))


def config_from_gguf(fields: Fields, tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    eps = fields.number("attention.layer_norm_epsilon")
    return _config(gguf_common_fields(fields, tensors), eps)


def layout(
    config: ModelConfig, checkpoint_format: CheckpointFormat, tensors: Mapping[str, TensorInfo]
) -> Layout:
    root = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    weights = tuple(_weights(config, checkpoint_format == "gguf", root))
    ignored = frozenset(filter(_MASK_BUFFER.fullmatch, tensors))
    tied_head = weights[-1] if config.tie_word_embeddings else None
    return Layout(weights if tied_head is None else weights[:-1], ignored, tied_head)


def _weights(config: ModelConfig, is_gguf: bool, root: str) -> Iterator[Weight]:
    hidden, inner = config.hidden_size, config.intermediate_size
    # Name in safetensors and in GGUF, module here, rows and columns of its weight.
    modules = (
        ("ln_1", "attn_norm", "attention_norm", hidden, 0),
        ("attn.c_attn", "attn_qkv", "attention.qkv", 3 * hidden, hidden),
        ("attn.c_proj", "attn_output", "attention.output", hidden, hidden),
        ("ln_2", "ffn_norm", "mlp_norm", hidden, 0),
        ("mlp.c_fc", "ffn_up", "mlp.up", inner, hidden),
        ("mlp.c_proj", "ffn_down", "mlp.down", hidden, inner),
    )
    gguf_names = ("token_embd", "position_embd", "output_norm", "output")
    names = gguf_names if is_gguf else (f"{root}wte", f"{root}wpe", f"{root}ln_f", "lm_head")
    wte, wpe, norm, head = names
    vocab, context = (config.vocab_size, hidden), (config.max_position_embeddings, hidden)
    yield Weight(f"{wte}.weight", vocab, "embedding.weight")
    yield Weight(f"{wpe}.weight", context, "position_embedding.weight")
    for index in range(config.num_layers):
        for stem, gguf_stem, module, rows, columns in modules:
            name = f"blk.{index}.{gguf_stem}" if is_gguf else f"{root}h.{index}.{stem}"
            # Conv1D stored its weight as [in, out]; the GGUF conversion turns it round.
            is_transposed = bool(columns) and not is_gguf
            shape = (columns, rows) if is_transposed else (rows, columns) if columns else (rows,)
            to = f"layers.{index}.{module}"
            yield Weight(f"{name}.weight", shape, f"{to}.weight", is_transposed=is_transposed)
            yield Weight(f"{name}.bias", (rows,), f"{to}.bias")
    yield from (Weight(f"{norm}.{kind}", (hidden,), f"norm.{kind}") for kind in ("weight", "bias"))
    yield Weight(f"{head}.weight", vocab, "head.weight")


def build(config: ModelConfig, options: BuildOptions) -> CausalLM:
    from pagetide_models.decoder import compose_decoder
    from pagetide_models.layers import MLP, LayerNorm

    return compose_decoder(config, options, norm=LayerNorm, mlp=MLP)


ARCHITECTURE = Architecture("gpt2", config_from_json, config_from_gguf, layout, build)
