"""Where a tensor lies in a checkpoint: all that a header says about it, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pagetide_models.errors import ModelFormatError, UnsupportedModelError

__all__ = ["ENCODINGS", "Encoding", "TensorInfo"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """How elements are stored: ``block_elements`` of them take ``block_bytes`` bytes."""

    name: str
    block_elements: int
    block_bytes: int

    def num_bytes(self, num_elements: int) -> int:
        return num_elements // self.block_elements * self.block_bytes


# The encodings whose values this package can read. Block layouts: the GGUF specification.
ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        Encoding("F64", 1, 8),
        Encoding("F32", 1, 4),
        Encoding("F16", 1, 2),
        Encoding("BF16", 1, 2),
        Encoding("Q4_0", 32, 18),
        Encoding("Q4_1", 32, 20),
        Encoding("Q5_0", 32, 22),
        Encoding("Q5_1", 32, 24),
        Encoding("Q8_0", 32, 34),
        Encoding("Q2_K", 256, 84),
        Encoding("Q3_K", 256, 110),
        Encoding("Q4_K", 256, 144),
        Encoding("Q5_K", 256, 176),
        Encoding("Q6_K", 256, 210),
    )
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: Its name in the file.
        shape: Its shape as torch orders it (rows first), whatever the file's own order.
        encoding: A name of :data:`ENCODINGS`, or another that `check_readable` refuses.
        path: The file that holds it.
        offset: Its first byte, from the start of the file.
        num_bytes: How many bytes it takes there.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    path: Path
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def check_readable(self) -> None:
        """Raise `UnsupportedModelError` if the values cannot be decoded here."""
        if self.encoding not in ENCODINGS:
            raise UnsupportedModelError(
                f"{self.path}: tensor {self.name!r} is stored as {self.encoding}, which is not "
                f"supported; convert the file to one of {', '.join(ENCODINGS)}"
            )


def check_no_overlap(tensors: list[TensorInfo]) -> None:
    """Raise `ModelFormatError` if two tensors of one file share bytes."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes))
    for before, after in pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise ModelFormatError(
                f"{after.path}: tensor {after.name!r} overlaps tensor {before.name!r} "
                f"(byte {after.offset} lies inside it)"
            )
