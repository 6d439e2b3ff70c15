"""A bounded reader of GGUF headers: metadata and tensor places, no values and no torch.

Every count, length and offset is compared with the bytes that are left in the file before anything
is allocated for it, so a damaged or hostile header costs no more than the file it comes in.
Format: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Union

from pagetide_models.errors import ModelFormatError
from pagetide_models.tensors import ENCODINGS, TensorInfo, check_no_overlap

__all__ = ["MAGIC", "GGUFHeader", "GGUFValue", "read_gguf_header"]

# `array` is not subscriptable on every supported Python, hence the strings.
GGUFValue = Union[int, float, bool, str, "array[int]", "array[float]", "list[str]", "list[bool]"]

MAGIC: Final = b"GGUF"
MAX_KEY_BYTES: Final = 65_535  # the specification's limit
MAX_NAME_BYTES: Final = 1_024  # the specification says 64; some writers go a little beyond
MAX_DIMENSIONS: Final = 4
MAX_ARRAY_STRINGS: Final = 1 << 22  # the largest vocabularies have 2^18 tokens and 2^19 merges
MAX_ALIGNMENT: Final = 1 << 20
DEFAULT_ALIGNMENT: Final = 32

_UINT8, _BOOL, _STRING, _ARRAY = 0, 7, 8, 9
# value type -> struct format; the same letters are `array` type codes of the same widths.
_NUMBERS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

# ggml's numbers for tensor types: the readable ones are in ENCODINGS, the others only named.
_TENSOR_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What the head of a GGUF file says.

    Attributes:
        path: The file.
        version: 2 or 3.
        metadata: The key-value pairs in file order, read-only.
        tensors: Places and shapes (torch order) by name, in file order, read-only.
    """

    path: Path
    version: int
    metadata: MappingProxyType[str, GGUFValue]
    tensors: MappingProxyType[str, TensorInfo]


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises:
        ModelFormatError: Not GGUF, cut short, or a count, length, alignment, dimension, type or
            offset that the file cannot hold. The message names the file and the entry.
    """
    path = Path(path)
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic != MAGIC:
            raise ModelFormatError(
                f"{path}: not a GGUF file (it starts with {magic!r} instead of {MAGIC!r})"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()


class _Reader:
    """A cursor over the mapped file that refuses to step beyond its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = len(MAGIC)
        self.where = "the header"

    def fail(self, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {self.where}: {problem}")

    def take(self, num_bytes: int) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.fail(
                f"needs {num_bytes} bytes at byte {start}, but the file ends at {self.size}: "
                "it is cut short or damaged; fetch it again"
            )
        self.position = start + num_bytes
        return start

    def number(self, code: str) -> int | float:
        fmt = "<" + code
        value: int | float = struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt)))[0]
        return value

    def unsigned(self, code: str) -> int:
        return int(self.number(code))

    def text(self, limit: int | None = None) -> str:
        length = self.unsigned("Q")
        if limit is not None and length > limit:
            raise self.fail(f"a name of {length} bytes; at most {limit} are allowed")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"text at byte {start} is not UTF-8 ({error.reason})") from None

    def boolean(self) -> bool:
        value = self.unsigned("B")
        if value > 1:
            raise self.fail(f"a boolean holds {value}")
        return bool(value)

    def read(self) -> GGUFHeader:
        version = self.unsigned("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "it is big-endian" if swapped in (2, 3) else "versions 2 and 3 are read"
            raise self.fail(f"GGUF version {version} is not supported ({hint})")
        num_tensors = self.unsigned("Q")
        num_pairs = self.unsigned("Q")
        # The smallest pair takes 13 bytes and the smallest tensor entry 32.
        if num_pairs * 13 + num_tensors * 32 > self.size - self.position:
            raise self.fail(
                f"claims {num_pairs} metadata pairs and {num_tensors} tensors, "
                f"more than its {self.size} bytes can describe"
            )
        metadata: dict[str, GGUFValue] = {}
        for index in range(num_pairs):
            self.where = f"metadata pair {index}"
            key = self.text(MAX_KEY_BYTES)
            self.where = f"metadata key {key[:80]!r}"
            if key in metadata:
                raise self.fail("appears twice")
            metadata[key] = self.value()
        tensors = self.tensors(num_tensors, self.alignment(metadata))
        return GGUFHeader(self.path, version, MappingProxyType(metadata), MappingProxyType(tensors))

    def alignment(self, metadata: dict[str, GGUFValue]) -> int:
        self.where = "metadata key 'general.alignment'"
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_valid = isinstance(value, int) and not isinstance(value, bool)
        if not (is_valid and 8 <= value <= MAX_ALIGNMENT and value & (value - 1) == 0):  # type: ignore[operator]
            raise self.fail(f"{value!r} is not a power of two from 8 to {MAX_ALIGNMENT}")
        return int(value)  # type: ignore[arg-type]

    def value(self) -> GGUFValue:
        kind = self.unsigned("I")
        if kind == _STRING:
            return self.text()
        if kind == _BOOL:
            return self.boolean()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _ARRAY:
            return self.array()
        raise self.fail(f"value type {kind} does not exist")

    def array(self) -> GGUFValue:
        kind = self.unsigned("I")
        length = self.unsigned("Q")
        if kind in _NUMBERS:
            values = array(_NUMBERS[kind])
            start = self.take(length * values.itemsize)
            values.frombytes(self.data[start : self.position])
            return values
        if kind == _BOOL:
            start = self.take(length)
            raw = self.data[start : self.position]
            if raw.strip(b"\0\1"):
                raise self.fail("an array of booleans holds other values than 0 and 1")
            return [bool(byte) for byte in raw]
        if kind == _STRING:
            return list(self.strings(length))
        raise self.fail(f"an array of value type {kind} is not supported")

    def strings(self, count: int) -> Iterator[str]:
        if count > MAX_ARRAY_STRINGS or count * 8 > self.size - self.position:
            raise self.fail(f"an array of {count} strings is more than the file can hold")
        # The one loop that runs 100,000 times for a vocabulary: locals instead of `take`.
        data, size, position = self.data, self.size, self.position
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if size - position < 8:
                break
            end = position + 8 + length_of(data, position)[0]
            if end > size:
                break
            try:
                yield data[position + 8 : end].decode("utf-8")
            except UnicodeDecodeError as error:
                raise self.fail(f"text at byte {position} is not UTF-8 ({error.reason})") from None
            position = end
        else:
            self.position = position
            return
        raise self.fail(f"a string at byte {position} runs beyond the end of the file at {size}")

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            self.where = f"tensor entry {index}"
            name = self.text(MAX_NAME_BYTES)
            self.where = f"tensor {name!r}"
            if name in entries:
                raise self.fail("appears twice")
            num_dimensions = self.unsigned("I")
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise self.fail(f"{num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
            dimensions = tuple(self.unsigned("Q") for _ in range(num_dimensions))
            entries[name] = (dimensions, self.unsigned("I"), self.unsigned("Q"))
        start = -(-self.position // alignment) * alignment
        tensors = {
            name: self.tensor(name, start, alignment, *entry) for name, entry in entries.items()
        }
        check_no_overlap(list(tensors.values()))
        return tensors

    def tensor(
        self,
        name: str,
        data_start: int,
        alignment: int,
        dimensions: tuple[int, ...],
        kind: int,
        offset: int,
    ) -> TensorInfo:
        self.where = f"tensor {name!r}"
        if kind not in _TENSOR_TYPES:
            raise self.fail(f"tensor type {kind} does not exist")
        if 0 in dimensions:
            raise self.fail(f"a dimension is 0 in {list(dimensions)}")
        if offset % alignment:
            raise self.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
        encoding = _TENSOR_TYPES[kind]
        num_bytes = 0  # of a type that is only named; its place is checked as far as it is known
        if encoding in ENCODINGS:
            layout = ENCODINGS[encoding]
            if dimensions[0] % layout.block_elements:
                raise self.fail(
                    f"rows of {dimensions[0]} elements are not whole {encoding} blocks "
                    f"of {layout.block_elements}"
                )
            num_elements = 1
            for dimension in dimensions:
                num_elements *= dimension
            num_bytes = layout.num_bytes(num_elements)
        if data_start + offset + num_bytes > self.size:
            raise self.fail(
                f"{list(dimensions)} in {encoding} needs bytes {data_start + offset} to "
                f"{data_start + offset + num_bytes}, but the file ends at {self.size}: "
                "it is cut short or damaged; fetch it again"
            )
        shape = dimensions[::-1]  # GGUF writes the fastest dimension first
        return TensorInfo(name, shape, encoding, self.path, data_start + offset, num_bytes)
