"""Reading weights: tensor by tensor from the file into the parameters, and nothing left out."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from pagetide_models.errors import ModelFormatError
from pagetide_models.layers import num_padding_rows
from pagetide_models.layout import Layout, Weight
from pagetide_models.tensors import ENCODINGS, TensorInfo

if TYPE_CHECKING:
    from pagetide_models.source import ModelSource

__all__ = ["Float16RangeError", "fill_parameters", "is_same_tensor", "read_tensor", "unpermute"]

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_CHUNK_BYTES: Final = 1 << 24
_ROW_BLOCKS: Final = 256


class Float16RangeError(ModelFormatError):
    """A weight lies beyond float16's range, in which the model was to be held."""


def _read_bytes(info: TensorInfo) -> Tensor:
    """The tensor's bytes as uint8 [num_bytes]: read, not mapped: no second copy in memory."""
    buffer = torch.empty(info.num_bytes, dtype=torch.uint8)
    with open(info.path, "rb", buffering=0) as file:
        file.seek(info.offset)
        view = memoryview(buffer.numpy().data)
        done = 0
        while done < info.num_bytes:
            count = file.readinto(view[done:])
            if not count:
                raise ModelFormatError(
                    f"{info.path}: tensor {info.name!r} is cut short after {done} of "
                    f"{info.num_bytes} bytes; fetch the file again"
                )
            done += count
    return buffer


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor's values on the CPU, quantised ones dequantised to float32.

    Raises:
        ModelFormatError: The file ends inside it.
    """
    raw = _read_bytes(info)
    if info.encoding in _DTYPES:
        if sys.byteorder != "little":
            raise ModelFormatError(f"{info.path}: little-endian files need a little-endian machine")
        return raw.view(_DTYPES[info.encoding]).view(info.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # The library works on 16 rows at a time: long rows of our own choice keep it out of Python.
    block_bytes = ENCODINGS[info.encoding].block_bytes
    row_blocks = math.gcd(info.num_bytes // block_bytes, _ROW_BLOCKS)
    rows = raw.numpy().reshape(-1, row_blocks * block_bytes)
    values = dequantize(rows, GGMLQuantizationType[info.encoding])
    return torch.from_numpy(values).view(info.shape)


def unpermute(values: Tensor, num_heads: int) -> Tensor:
    """Undo the row order that llama's GGUF conversion gives q and k.

    The conversion turns each head's rows from halves (row i pairs with row i + d/2, as Hugging Face
    rotates) into neighbours (2i with 2i + 1). Weights [heads * d, in] and biases [heads * d] alike.
    """
    rows = values.shape[0] // num_heads
    return values.view(num_heads, rows // 2, 2, -1).transpose(1, 2).reshape(values.shape)


def is_same_tensor(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors hold the same bytes in the same encoding and shape."""
    if (first.encoding, first.shape) != (second.encoding, second.shape):
        return False
    with open(first.path, "rb") as a, open(second.path, "rb") as b:
        a.seek(first.offset)
        b.seek(second.offset)
        for start in range(0, first.num_bytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, first.num_bytes - start)
            if a.read(size) != b.read(size):
                return False
    return True


def fill_parameters(model: nn.Module, source: ModelSource, layout: Layout, show: bool) -> None:
    """Fill every parameter from the file, in file order, each tensor going straight to its device.

    Args:
        model: Its parameters still unset.
        source: Where the tensors are.
        layout: Which goes where; checked against the header already.
        show: Draw a progress bar on a terminal (none in a pipe).

    Raises:
        ModelFormatError: A tensor is cut short or does not fit float16 (`Float16RangeError`), or a
            parameter would stay unset.
    """
    parameters = dict(model.named_parameters())
    filled: Counter[str] = Counter()
    with torch.no_grad():
        for weight, info in _in_file_order(source, layout, show):
            values = read_tensor(info)
            if weight.is_transposed:
                values = values.t()
            if weight.rotary_heads:
                values = unpermute(values, weight.rotary_heads)
            target = parameters.get(weight.parameter)
            if target is None or target[weight.first_row :].shape[0] < values.shape[0]:
                raise ModelFormatError(
                    f"{info.path}: tensor {info.name!r} has no place in the model: the layout's "
                    f"parameter {weight.parameter!r} does not exist or is too small"
                )
            _check_range(values, target.dtype, info)
            target[weight.first_row : weight.first_row + values.shape[0]].copy_(values)
            filled[weight.parameter] += values.shape[0]
    for name, parameter in parameters.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if filled[name] != parameter.shape[0] - num_padding_rows(module):
            raise ModelFormatError(
                f"{source.path}: the layout fills {filled[name]} rows of parameter {name!r}, "
                f"which has {parameter.shape[0]}"
            )


def _in_file_order(
    source: ModelSource, layout: Layout, show: bool
) -> Iterator[tuple[Weight, TensorInfo]]:
    from tqdm import tqdm

    pairs = [(weight, source.tensors[weight.tensor]) for weight in layout.weights]
    pairs.sort(key=lambda pair: (str(pair[1].path), pair[1].offset))
    total = sum(info.num_bytes for _, info in pairs)
    # disable=None: no bar where the output is not a terminal.
    with tqdm(
        total=total,
        desc="loading weights",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None if show else True,
    ) as bar:
        for weight, info in pairs:
            yield weight, info
            bar.update(info.num_bytes)


def _check_range(values: Tensor, dtype: torch.dtype, info: TensorInfo) -> None:
    if dtype != torch.float16 or values.dtype == torch.float16:
        return
    largest = float(values.abs().max())
    if largest > torch.finfo(torch.float16).max:
        raise Float16RangeError(
            f"{info.path}: tensor {info.name!r} reaches {largest:.0f}, beyond float16's 65504; "
            "load the model with dtype='float32' (or 'bfloat16')"
        )
