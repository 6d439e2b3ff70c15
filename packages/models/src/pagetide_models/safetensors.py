"""Headers of safetensors files, single and sharded: places and shapes, no values and no torch.

Format: an unsigned 64-bit length, that many bytes of JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pagetide_models.errors import ModelFormatError
from pagetide_models.tensors import ENCODINGS, TensorInfo, check_no_overlap

__all__ = ["read_json_object", "read_safetensors_folder", "read_safetensors_header"]

MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the reference implementation
MAX_JSON_BYTES: Final = 100_000_000
MAX_DIMENSIONS: Final = 8
_ITEM_BYTES: Final = {"F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2,
                      "U32": 4, "I32": 4, "U64": 8, "I64": 8}  # fmt: skip
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} appears twice")
            seen.add(key)
    return result


def parse_json_object(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """Parse a JSON object; a repeated key is an error, not the last one's victory."""
    try:
        value = json.loads(text, object_pairs_hook=_object_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: {what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: {what} should be a JSON object")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold one object.

    Raises:
        ModelFormatError: Too large, not JSON, a repeated key, or not an object.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ModelFormatError(f"{path}: {size} bytes are too many for a JSON file")
    return parse_json_object(path.read_bytes(), path, "the file")


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """Read where the tensors of one safetensors file lie.

    Raises:
        ModelFormatError: Damaged, cut short, or tensors that overlap or do not fit their shape.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelFormatError(
                f"{path}: not a safetensors file, or cut short: its header claims {length} bytes, "
                f"the file has {size}"
            )
        header = parse_json_object(file.read(length), path, "the header")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(path, name, entry, start, size) for name, entry in header.items()}
    check_no_overlap(list(tensors.values()))
    return tensors


def _tensor(path: Path, name: str, entry: object, start: int, file_size: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ModelFormatError(f"{where}: needs exactly dtype, shape and data_offsets")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    is_valid = (
        isinstance(dtype, str)
        and _are_sizes(shape)
        and len(shape) <= MAX_DIMENSIONS
        and _are_sizes(offsets)
        and len(offsets) == 2
    )
    if not is_valid:
        raise ModelFormatError(f"{where}: damaged entry {str(entry)[:120]}")
    item_bytes = ENCODINGS[dtype].block_bytes if dtype in ENCODINGS else _ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise ModelFormatError(f"{where}: dtype {dtype!r:.40} does not exist")
    begin, end = offsets
    info = TensorInfo(name, tuple(shape), dtype, path, start + begin, end - begin)
    if info.num_bytes != info.num_elements * item_bytes:
        raise ModelFormatError(
            f"{where}: {shape} in {dtype} takes {info.num_elements * item_bytes} bytes, "
            f"but the header gives it {info.num_bytes}"
        )
    if start + end > file_size:
        raise ModelFormatError(
            f"{where}: ends at byte {start + end}, but the file ends at {file_size}: "
            "it is cut short; fetch it again"
        )
    return info


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62
        for item in value
    )


def _is_plain_name(shard: object) -> bool:
    return (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and not any(separator in shard for separator in "/\\\0")
    )


def read_safetensors_folder(folder: Path) -> Mapping[str, TensorInfo]:
    """Read the headers of a checkpoint: the index decides which files count, strays are ignored.

    Raises:
        ModelFormatError: No weights, a shard that is missing or lies outside the folder, or a
            tensor that is not in the shard the index names or in two of them.
    """
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            found = sorted(path.name for path in folder.glob("*.safetensors"))
            raise ModelFormatError(
                f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
                + (f" (only {', '.join(found[:3])})" if found else "")
            )
        return MappingProxyType(read_safetensors_header(single))
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{index_path}: weight_map is missing or empty")
    shards: dict[str, dict[str, TensorInfo]] = {}
    for name, shard in weight_map.items():
        if not _is_plain_name(shard):
            raise ModelFormatError(
                f"{index_path}: tensor {name!r} is said to be in {shard!r}, "
                "which is not a plain file name in this folder"
            )
        if shard not in shards:
            if not (folder / shard).is_file():
                raise ModelFormatError(
                    f"{index_path}: shard {shard!r} (tensor {name!r}) is missing; fetch it"
                )
            shards[shard] = read_safetensors_header(folder / shard)
        if name not in shards[shard]:
            raise ModelFormatError(
                f"{folder / shard}: tensor {name!r} is missing, though the index names it"
            )
    tensors: dict[str, TensorInfo] = {}
    for shard, header in shards.items():
        for name, info in header.items():
            if name in tensors:
                raise ModelFormatError(
                    f"{folder / shard}: tensor {name!r} is in {tensors[name].path.name} as well"
                )
            tensors[name] = info
    return MappingProxyType(tensors)
