"""Which tensor of a file fills which parameter, checked against a header before torch is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagetide_models.errors import ModelFormatError
from pagetide_models.tensors import TensorInfo

__all__ = ["CheckpointFormat", "Layout", "Weight", "check_layout"]

CheckpointFormat = Literal["safetensors", "gguf"]


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a file and where its values go.

    Attributes:
        tensor: Its name in the file.
        shape: The shape it must have there (torch order).
        parameter: The module parameter it fills, as `named_parameters` names it.
        first_row: The parameter's row at which it starts: fused weights take several tensors.
        is_transposed: The file holds [in, out] where the parameter is [out, in].
        rotary_heads: Of a llama GGUF's q or k, whose rows were reordered by head: how many heads.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: str
    first_row: int = 0
    is_transposed: bool = False
    rotary_heads: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything a checkpoint of one architecture must and may contain.

    Attributes:
        weights: The required tensors.
        ignored: Names that may be present and are not read (buffers that old files carry).
        tied_head: A head that may be present although the embedding serves for it.
    """

    weights: tuple[Weight, ...]
    ignored: frozenset[str] = frozenset()
    tied_head: Weight | None = None


def check_layout(layout: Layout, tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """Compare a checkpoint's header with what its architecture needs.

    Raises:
        ModelFormatError: A tensor is missing, unknown or of the wrong shape; the message names up
            to three of them and the file.
        UnsupportedModelError: A tensor is stored in an encoding that cannot be read.
    """
    expected = {weight.tensor: weight for weight in layout.weights}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ModelFormatError(
            f"{path}: missing {_list(missing)}; the checkpoint is incomplete or not of the "
            "architecture it names"
        )
    if layout.tied_head is not None:
        expected[layout.tied_head.tensor] = layout.tied_head
    unknown = [name for name in tensors if name not in expected and name not in layout.ignored]
    if unknown:
        raise ModelFormatError(
            f"{tensors[unknown[0]].path}: unknown {_list(unknown)}; loading it would ignore "
            "weights that the model was trained with"
        )
    for name, info in tensors.items():
        if name in layout.ignored:
            continue
        if info.shape != expected[name].shape:
            raise ModelFormatError(
                f"{info.path}: tensor {name!r} has shape {list(info.shape)}, but the configuration "
                f"gives {list(expected[name].shape)}"
            )
        info.check_readable()


def _list(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
