"""The Llama architecture: SmolLM2, Llama 2 and 3, and whatever saves itself under that name.

Pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and a gated SiLU MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pagetide_models.config import ModelConfig
from pagetide_models.decoder_fields import gguf_decoder_fields, json_decoder_fields
from pagetide_models.decoder_layout import decoder_layout
from pagetide_models.fields import Fields
from pagetide_models.layout import CheckpointFormat, Layout
from pagetide_models.registry import Architecture
from pagetide_models.tensors import TensorInfo

if TYPE_CHECKING:
    from pagetide_models.decoder import BuildOptions, CausalLM

__all__ = ["ARCHITECTURE"]


def config_from_json(fields: Fields) -> ModelConfig:
    has_bias = fields.boolean("attention_bias", False)
    return ModelConfig(
        architecture="llama",
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        **json_decoder_fields(fields),
    )


def config_from_gguf(fields: Fields, tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        **gguf_decoder_fields(fields, tensors),
    )


def layout(
    config: ModelConfig, checkpoint_format: CheckpointFormat, tensors: Mapping[str, TensorInfo]
) -> Layout:
    # The GGUF conversion reorders the rows of q and k from halves to pairs; see weights.unpermute.
    return decoder_layout(config, checkpoint_format, tensors, has_paired_rotary_rows=True)


def build(config: ModelConfig, options: BuildOptions) -> CausalLM:
    from pagetide_models.decoder import compose_decoder

    return compose_decoder(config, options)


ARCHITECTURE = Architecture(
    name="llama",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    layout=layout,
    build=build,
)
