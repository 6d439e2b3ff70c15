"""Fetching a model from the Hugging Face hub, and saying what to do when that cannot work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pagetide_models.errors import ModelNotFoundError

__all__ = ["download", "is_hub_id"]

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+){0,1}(/[\w.-]+\.gguf)?", re.ASCII)
_WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model")


def is_hub_id(text: str) -> bool:
    """Whether `text` could be ``name``, ``org/name`` or ``org/name/file.gguf``."""
    is_file_like = text.count("/") < 2 and Path(text).suffix in (".gguf", ".safetensors", ".bin")
    return not is_file_like and not text.startswith((".", "-")) and bool(_HUB_ID.fullmatch(text))


def download(hub_id: str, revision: str | None) -> Path:
    """Fetch a model into huggingface_hub's cache, or find it there.

    Raises:
        ModelNotFoundError: There is no such model, or it is neither reachable nor cached.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ModelNotFoundError(
            f"{hub_id}: no such file or folder; to fetch it as a hub id, "
            "install it: pip install huggingface_hub"
        ) from None

    at = f" at revision {revision!r}" if revision else ""
    try:
        if hub_id.endswith(".gguf"):
            repo, file = hub_id.rsplit("/", 1)
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision))
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=["*/*"]
            )
        )
    except errors.GatedRepoError:
        raise ModelNotFoundError(
            f"{hub_id}{at}: this model is gated; accept its terms on huggingface.co and log in "
            "with `hf auth login`"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        kind = "revision" if isinstance(error, errors.RevisionNotFoundError) else "model"
        raise ModelNotFoundError(
            f"{hub_id}{at}: no such file or folder, and no such {kind} on the Hugging Face hub "
            "(a private one needs `hf auth login`)"
        ) from None
    except errors.EntryNotFoundError as error:
        if not isinstance(error, errors.LocalEntryNotFoundError):
            raise ModelNotFoundError(f"{hub_id}{at}: the hub model has no such file") from None
        raise _unreachable(hub_id, at) from error
    except Exception as error:
        # Whatever the HTTP layer raises: huggingface_hub has changed that layer before.
        raise _unreachable(hub_id, at) from error


def _unreachable(hub_id: str, at: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{hub_id}{at}: no such file or folder, and the Hugging Face hub cannot be reached, nor is "
        "the model in the local cache. Check the network (and HF_HUB_OFFLINE), or run "
        f"`hf download {hub_id}` where there is one and give the folder"
    )
