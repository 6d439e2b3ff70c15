"""Finding and checking a model before any weight is read: no torch here.

`open_model` answers everything that headers and configuration show, in well under a second, so
that a wrong file is refused before torch is imported or a weight is touched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pagetide_models.config import ModelConfig
from pagetide_models.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from pagetide_models.fields import Fields
from pagetide_models.gguf import MAGIC, GGUFHeader, read_gguf_header
from pagetide_models.layout import CheckpointFormat, Layout, check_layout
from pagetide_models.registry import Architecture, find_architecture
from pagetide_models.safetensors import read_json_object, read_safetensors_folder
from pagetide_models.tensors import TensorInfo

if TYPE_CHECKING:
    from pagetide_models.tokenizer import Tokenizer

__all__ = ["ModelSource", "open_model"]

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_TEMPLATE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found and whose headers fit its architecture.

    Attributes:
        path: The GGUF file, or the folder with config.json.
        checkpoint_format: ``gguf`` or ``safetensors``.
        architecture: Who builds it.
        config: Its configuration.
        tensors: Where each tensor lies.
        gguf: The header of a GGUF file, else None.
    """

    path: Path
    checkpoint_format: CheckpointFormat
    architecture: Architecture
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    gguf: GGUFHeader | None = None

    @property
    def layout(self) -> Layout:
        """Which tensor fills which parameter."""
        return self.architecture.layout(self.config, self.checkpoint_format, self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as they are stored."""
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's own chat template, or None."""
        from pagetide_models.chat_template import find_chat_template

        return find_chat_template(self)

    def load_tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the same file or folder (needs the `tokenizers` package).

        Raises:
            ModelFormatError: Its tables are missing or inconsistent.
            UnsupportedModelError: Its kind or its pre-tokenizer rule is not implemented.
        """
        if self.gguf is not None:
            from pagetide_models.gguf_tokenizer import tokenizer_from_gguf

            return tokenizer_from_gguf(self.gguf, self.config)
        from pagetide_models.folder_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self)


def open_model(
    path_or_hub_id: str | os.PathLike[str], *, revision: str | None = None
) -> ModelSource:
    """Find a model and check its configuration and tensor headers, without importing torch.

    Args:
        path_or_hub_id: A GGUF file; a folder with config.json, safetensors and tokenizer.json; or a
            Hugging Face hub id (``org/name``, or ``org/name/file.gguf`` for one file of it), which
            is downloaded into huggingface_hub's cache.
        revision: The branch, tag or commit of a hub id.

    Raises:
        ModelNotFoundError: No such path, and no hub model that can be reached.
        ModelFormatError: The file is damaged, incomplete, or a format that is refused.
        UnsupportedModelError: An architecture or encoding that is not implemented.
    """
    text = os.fspath(path_or_hub_id)
    path = Path(text).expanduser()
    if not path.exists():
        path = _from_hub(text, revision)
    if path.is_dir():
        return _open_folder(path)
    return _open_file(path)


def _from_hub(text: str, revision: str | None) -> Path:
    from pagetide_models.hub import download, is_hub_id

    if not is_hub_id(text):
        raise ModelNotFoundError(
            f"{text}: no such file or folder (and not the form of a Hugging Face hub id, org/name)"
        )
    return download(text, revision)


def _open_file(path: Path) -> ModelSource:
    if not path.is_file():
        raise ModelFormatError(f"{path}: not a regular file; weights are read at offsets in it")
    if path.suffix.lower() in _PICKLES:
        raise ModelFormatError(
            f"{path}: pickled weights are refused, because loading a pickle can run any code in "
            "it; convert them to safetensors or GGUF"
        )
    try:
        with open(path, "rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from None
    if magic != MAGIC and path.suffix == ".safetensors":
        raise ModelFormatError(
            f"{path}: give the folder {path.parent} instead: config.json and tokenizer.json in it "
            "are needed too"
        )
    return open_gguf(path)


def open_gguf(path: Path) -> ModelSource:
    header = read_gguf_header(path)
    name = Fields(header.metadata, path).text("general.architecture")
    architecture = find_architecture(name, str(path))
    if architecture.config_from_gguf is None:
        raise UnsupportedModelError(f"{path}: {name!r} models are not read from GGUF")
    try:
        config = architecture.config_from_gguf(
            Fields(header.metadata, path, f"{name}."), header.tensors
        )
    except ModelFormatError:
        raise
    except ValueError as error:
        raise _with_path(path, error) from None
    source = ModelSource(path, "gguf", architecture, config, header.tensors, header)
    return _checked(source)


def _open_folder(path: Path) -> ModelSource:
    config_path = path / "config.json"
    if not config_path.exists():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; to use a GGUF file, name it: {ggufs[0]}" if ggufs else ""
        raise ModelNotFoundError(f"{path}: a folder without config.json{hint}")
    raw = read_json_object(config_path)
    generation_path = path / "generation_config.json"
    if generation_path.exists():
        # Generation stops at what generation_config.json names; config.json often lags behind.
        eos = read_json_object(generation_path).get("eos_token_id")
        raw = raw if eos is None else {**raw, "eos_token_id": eos}
    fields = Fields(raw, config_path)
    architecture = find_architecture(fields.text("model_type"), str(config_path))
    try:
        config = architecture.config_from_json(fields)
    except ModelFormatError:
        raise
    except ValueError as error:
        raise _with_path(config_path, error) from None
    has_safetensors = any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if not has_safetensors and pickles:
        raise ModelFormatError(
            f"{path}: its weights are pickled ({pickles[0]}), which is refused because loading a "
            "pickle can run any code in it; convert them to safetensors"
        )
    tensors = read_safetensors_folder(path)
    return _checked(ModelSource(path, "safetensors", architecture, config, tensors))


def _with_path(path: Path, error: ValueError) -> ValueError:
    """The same complaint with the file in front; `UnsupportedModelError` names it already."""
    return error if str(path) in str(error) else ModelFormatError(f"{path}: {error}")


def _checked(source: ModelSource) -> ModelSource:
    if source.config.num_layers > len(source.tensors):
        raise ModelFormatError(
            f"{source.path}: {source.config.num_layers} layers are configured, but there are only "
            f"{len(source.tensors)} tensors"
        )
    check_layout(source.layout, source.tensors, source.path)
    return source
