"""The Mistral architecture: Llama with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pagetide_models.config import ModelConfig
from pagetide_models.decoder_fields import json_decoder_fields
from pagetide_models.decoder_layout import decoder_layout
from pagetide_models.fields import Fields
from pagetide_models.layout import CheckpointFormat, Layout
from pagetide_models.registry import Architecture
from pagetide_models.tensors import TensorInfo

if TYPE_CHECKING:
    from pagetide_models.decoder import BuildOptions, CausalLM

__all__ = ["ARCHITECTURE"]


def config_from_json(fields: Fields) -> ModelConfig:
    shape = json_decoder_fields(fields)
    # Version 0.1 leaves its window of 4,096 out or writes it; later ones write null: none.
    is_absent = "sliding_window" not in fields.values
    window = 4096 if is_absent else fields.optional_integer("sliding_window")
    windows = () if window is None else (window,) * shape["num_layers"]
    return ModelConfig(architecture="mistral", layer_windows=windows, **shape)


def layout(
    config: ModelConfig, checkpoint_format: CheckpointFormat, tensors: Mapping[str, TensorInfo]
) -> Layout:
    return decoder_layout(config, checkpoint_format, tensors, has_paired_rotary_rows=True)


def build(config: ModelConfig, options: BuildOptions) -> CausalLM:
    from pagetide_models.decoder import compose_decoder

    return compose_decoder(config, options)


ARCHITECTURE = Architecture(
    name="mistral",
    config_from_json=config_from_json,
    config_from_gguf=None,  # its GGUF files call themselves llama
    layout=layout,
    build=build,
)
