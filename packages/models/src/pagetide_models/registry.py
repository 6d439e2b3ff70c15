"""The table of architectures: a name, and the three functions that make a model of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pagetide_models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pagetide_models.config import ModelConfig
    from pagetide_models.decoder import BuildOptions, CausalLM
    from pagetide_models.fields import Fields
    from pagetide_models.layout import CheckpointFormat, Layout
    from pagetide_models.tensors import TensorInfo

__all__ = ["Architecture", "find_architecture", "register_model", "registered_models"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one architecture file provides. Only `build` may import torch, and only when called.

    Attributes:
        name: config.json's ``model_type`` and GGUF's ``general.architecture``.
        config_from_json: Reads config.json into a `ModelConfig`.
        config_from_gguf: Reads GGUF keys and tensor shapes into one; None: not stored as GGUF.
        layout: Names and shapes of the tensors a checkpoint must hold.
        build: Composes the model out of shared layers, its parameters still unset (NaN).
    """

    name: str
    config_from_json: Callable[[Fields], ModelConfig]
    config_from_gguf: Callable[[Fields, Mapping[str, TensorInfo]], ModelConfig] | None
    layout: Callable[[ModelConfig, CheckpointFormat, Mapping[str, TensorInfo]], Layout]
    build: Callable[[ModelConfig, BuildOptions], CausalLM]


# Imported when first asked for; each module holds an `ARCHITECTURE`.
_BUILT_IN: Final = {
    "gpt2": "pagetide_models.gpt2",
    "llama": "pagetide_models.llama",
    "mistral": "pagetide_models.mistral",
    "qwen2": "pagetide_models.qwen2",
    "qwen3": "pagetide_models.qwen3",
}
_registered: Final[dict[str, Architecture]] = {}


def register_model(architecture: Architecture, *, replace: bool = False) -> None:
    """Make an architecture known to `open_model` and `load_model`.

    Args:
        architecture: The new entry.
        replace: Allow it to take the place of one of the same name.

    Raises:
        ValueError: The name is taken and `replace` is false.
    """
    if not replace and architecture.name in registered_models():
        raise ValueError(
            f"architecture {architecture.name!r} is registered already; pass replace=True to "
            "take its place"
        )
    _registered[architecture.name] = architecture


def registered_models() -> tuple[str, ...]:
    """The names that can be opened."""
    return tuple(sorted({*_BUILT_IN, *_registered}))


def find_architecture(name: str, where: str) -> Architecture:
    """The architecture of that name.

    Raises:
        UnsupportedModelError: There is none; `where` (a file) opens the message.
    """
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        architecture: Architecture = importlib.import_module(_BUILT_IN[name]).ARCHITECTURE
        return architecture
    raise UnsupportedModelError(
        f"{where}: architecture {name!r} is not supported; these are: "
        f"{', '.join(registered_models())} (register_model adds one)"
    )
