"""The Qwen2 architecture: Llama with a bias on q, k and v, and a window on the later layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pagetide_models.config import ModelConfig
from pagetide_models.decoder_fields import (
    gguf_decoder_fields,
    json_decoder_fields,
    json_layer_windows,
)
from pagetide_models.decoder_layout import decoder_layout
from pagetide_models.fields import Fields
from pagetide_models.layout import CheckpointFormat, Layout
from pagetide_models.registry import Architecture
from pagetide_models.tensors import TensorInfo

if TYPE_CHECKING:
    from pagetide_models.decoder import BuildOptions, CausalLM

__all__ = ["ARCHITECTURE"]


def config_from_json(fields: Fields) -> ModelConfig:
    return ModelConfig(
        architecture="qwen2",
        qkv_bias=True,
        layer_windows=json_layer_windows(fields),
        **json_decoder_fields(fields),
    )


def config_from_gguf(fields: Fields, tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    return ModelConfig(architecture="qwen2", qkv_bias=True, **gguf_decoder_fields(fields, tensors))


def layout(
    config: ModelConfig, checkpoint_format: CheckpointFormat, tensors: Mapping[str, TensorInfo]
) -> Layout:
    return decoder_layout(config, checkpoint_format, tensors, has_paired_rotary_rows=False)


def build(config: ModelConfig, options: BuildOptions) -> CausalLM:
    from pagetide_models.decoder import compose_decoder

    return compose_decoder(config, options)


ARCHITECTURE = Architecture(
    name="qwen2",
    config_from_json=config_from_json,
    config_from_gguf=config_from_gguf,
    layout=layout,
    build=build,
)
