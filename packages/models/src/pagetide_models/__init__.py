"""GPT-2, Llama and Qwen2 language models over a paged KV cache.

Importing this package imports neither torch nor any other dependency: what needs them is loaded
when it is first used, so that a wrong model file is refused at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pagetide_models.__about__ import __version__

if TYPE_CHECKING:
    from pagetide_models.config import ModelConfig, RopeScaling
    from pagetide_models.decoder import CausalLM
    from pagetide_models.errors import (
        ChatTemplateError,
        ModelError,
        ModelFormatError,
        ModelNotFoundError,
        UnsupportedModelError,
    )
    from pagetide_models.loader import load_model
    from pagetide_models.registry import Architecture, register_model, registered_models
    from pagetide_models.source import ModelSource, open_model
    from pagetide_models.tokenizer import Tokenizer

_MODULES = {
    "Architecture": "registry",
    "CausalLM": "decoder",
    "ChatTemplateError": "errors",
    "ModelConfig": "config",
    "ModelError": "errors",
    "ModelFormatError": "errors",
    "ModelNotFoundError": "errors",
    "ModelSource": "source",
    "RopeScaling": "config",
    "Tokenizer": "tokenizer",
    "UnsupportedModelError": "errors",
    "load_model": "loader",
    "open_model": "source",
    "register_model": "registry",
    "registered_models": "registry",
}

__all__ = [
    "Architecture",
    "CausalLM",
    "ChatTemplateError",
    "ModelConfig",
    "ModelError",
    "ModelFormatError",
    "ModelNotFoundError",
    "ModelSource",
    "RopeScaling",
    "Tokenizer",
    "UnsupportedModelError",
    "__version__",
    "load_model",
    "open_model",
    "register_model",
    "registered_models",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
