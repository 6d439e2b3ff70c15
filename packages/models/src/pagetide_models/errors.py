"""What can go wrong between a name on the command line and a loaded model."""

from __future__ import annotations

__all__ = [
    "ChatTemplateError",
    "ModelError",
    "ModelFormatError",
    "ModelNotFoundError",
    "UnsupportedModelError",
]


class ModelError(Exception):
    """Base of every error this package raises about a model."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """The path does not exist, or the hub id cannot be fetched; the message says what to do."""


class ModelFormatError(ModelError, ValueError):
    """A file is damaged, incomplete or hostile; the message names the file and the entry in it."""


class UnsupportedModelError(ModelError, ValueError):
    """The file is sound, but this package does not implement what it asks for."""


class ChatTemplateError(ModelError, ValueError):
    """A chat template is missing, wrong, refuses the messages, or exceeds its bounds."""
