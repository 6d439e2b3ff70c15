"""The header reader: sound files, and E11, the malformed set: refused at once and cheaply."""

from __future__ import annotations

import resource
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagetide_models import ModelError, ModelFormatError, open_model
from pagetide_models.gguf import read_gguf_header


def test_values_of_every_type_are_read(tmp_path: Path, gguf_builder: Any) -> None:
    numbers = [(0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -300), (4, "I", 1 << 31),
               (5, "i", -7), (6, "f", 0.5), (10, "Q", 1 << 63), (11, "q", -(1 << 40)),
               (12, "d", 0.1)]  # fmt: skip
    body = b"".join(
        gguf_builder.text(f"n{kind}") + struct.pack(f"<I{code}", kind, value)
        for kind, code, value in numbers
    )
    body += gguf_builder.pairs({"s": "é", "t": True, "strings": ["a", "", "ü"], "ints": [1, -2]})
    body += gguf_builder.text("bools") + struct.pack("<IIQ3B", 9, 7, 3, 1, 0, 1)
    path = tmp_path / "values.gguf"
    path.write_bytes(gguf_builder.head(0, len(numbers) + 5) + body)
    header = read_gguf_header(path)
    for kind, _, value in numbers:
        assert header.metadata[f"n{kind}"] == value
    assert header.metadata["s"] == "é"
    assert header.metadata["t"] is True
    assert header.metadata["strings"] == ["a", "", "ü"]
    assert header.metadata["ints"] == array("i", [1, -2])
    assert header.metadata["bools"] == [True, False, True]


def test_tensors_have_torch_order_and_absolute_offsets(tmp_path: Path, gguf_builder: Any) -> None:
    path = tmp_path / "two.gguf"
    path.write_bytes(
        gguf_builder.file({"k": 1}, {"a": ((2, 3), b"\1" * 24), "b": ((5,), b"\2" * 20)})
    )
    header = read_gguf_header(path)
    raw = path.read_bytes()
    a, b = header.tensors["a"], header.tensors["b"]
    assert a.shape == (2, 3)
    assert raw[a.offset : a.offset + a.num_bytes] == b"\1" * 24
    assert raw[b.offset : b.offset + b.num_bytes] == b"\2" * 20
    assert a.offset % 32 == b.offset % 32 == 0


def test_header_is_read_only(tiny_gguf: Callable[..., Path]) -> None:
    header = read_gguf_header(tiny_gguf())
    with pytest.raises(TypeError):
        header.metadata["x"] = 1  # type: ignore[index]


def test_alignment_other_than_32(tmp_path: Path, gguf_builder: Any) -> None:
    gguf_builder.alignment = 64
    path = tmp_path / "aligned.gguf"
    path.write_bytes(gguf_builder.file({"general.alignment": 64}, {"a": ((3,), b"x" * 12)}))
    info = read_gguf_header(path).tensors["a"]
    assert info.offset % 64 == 0
    assert path.read_bytes()[info.offset : info.offset + 12] == b"x" * 12


def test_e11_truncated_at_every_byte(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_gguf().read_bytes()
    last = max(
        info.offset + info.num_bytes for info in read_gguf_header(tiny_gguf()).tensors.values()
    )
    header_end = min(info.offset for info in read_gguf_header(tiny_gguf()).tensors.values())
    cut = tmp_path / "cut.gguf"
    lengths = [*range(header_end + 1), *range(header_end + 1, last, 4099), last - 1]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            open_model(cut)


def _malformed(builder: Any) -> dict[str, bytes]:
    text, head, entry = builder.text, builder.head, builder.entry
    pair = builder.pairs({"k": 1})
    pad = bytes(4096)
    huge = struct.pack("<Q", 1 << 63)

    def tensor(dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
        return head(1, 0) + entry("w", dimensions, kind, offset) + pad

    def aligned(alignment: int) -> bytes:
        return head(0, 1) + builder.pairs({"general.alignment": alignment}) + pad

    return {
        "kv count 2^32-1": head(0, 2**32 - 1) + pair + pad,
        "kv count 2^64-1": head(0, 2**64 - 1) + pair + pad,
        "tensor count 2^64-1": head(2**64 - 1, 0) + pad,
        "key length 2^63": head(0, 1) + huge + pad,
        "key longer than allowed": head(0, 1) + text(b"k" * 70_000) + pad,
        "string length 2^63": head(0, 1) + text("k") + struct.pack("<I", 8) + huge + pad,
        "array length 2^63": head(0, 1) + text("k") + struct.pack("<II", 9, 4) + huge + pad,
        "array of strings 2^63": head(0, 1) + text("k") + struct.pack("<II", 9, 8) + huge + pad,
        "array length x size wraps": head(0, 1)
        + text("k")
        + struct.pack("<IIQ", 9, 10, 1 << 61)
        + pad,
        "array in array": head(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + pad,
        "value type 99": head(0, 1) + text("k") + struct.pack("<I", 99) + pad,
        "boolean 7": head(0, 1) + text("k") + struct.pack("<IB", 7, 7) + pad,
        "key not UTF-8": head(0, 1) + text(b"\xff\xfe") + struct.pack("<II", 4, 1) + pad,
        "key twice": head(0, 2) + pair + pair + pad,
        "alignment 0": aligned(0),
        "alignment 3": aligned(3),
        "alignment 24": aligned(24),
        "alignment 2^31": aligned(1 << 31),
        "alignment text": head(0, 1) + builder.pairs({"general.alignment": "32"}) + pad,
        "dimension 0": tensor([0]),
        "dimension 2^62": tensor([1 << 62]),
        "dimensions whose product wraps": tensor([1 << 32, 1 << 32]),
        "no dimensions": tensor([]),
        "2^32-1 dimensions": head(1, 0) + text("w") + struct.pack("<I", 2**32 - 1) + pad,
        "tensor type 200": tensor([4], kind=200),
        "rows that are no whole blocks": tensor([33], kind=8),
        "offset past the end": tensor([4], offset=1 << 40),
        "offset wraps": tensor([4], offset=2**64 - 32),
        "offset not aligned": tensor([4], offset=4),
        "tensor twice": head(2, 0) + entry("w", [4], 0, 0) + entry("w", [4], 0, 32) + pad,
        "tensors overlap": head(2, 0) + entry("v", [16], 0, 0) + entry("w", [4], 0, 32) + pad,
        "name longer than allowed": head(1, 0) + text(b"w" * 5000) + pad,
        "version 1": b"GGUF" + struct.pack("<I", 1) + pad,
        "version 99": b"GGUF" + struct.pack("<I", 99) + pad,
        "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + pad,
        "empty": b"",
        "text": b"I am a text file, not a model.\n" * 10,
        "zeros": pad,
    }


def test_e11_malformed_headers_are_refused_at_once(tmp_path: Path, gguf_builder: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, content in _malformed(gguf_builder).items():
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelFormatError, match=r"bad\.gguf") as caught:
            read_gguf_header(path)
        assert isinstance(caught.value, ValueError), name
        with pytest.raises(ModelError):
            open_model(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB on Linux
    assert grown < 64 * 1024


def test_e11_a_megabyte_of_noise_behind_a_sound_magic(tmp_path: Path) -> None:
    state = 12345
    path = tmp_path / "noise.gguf"
    for _ in range(300):
        noise = bytearray()
        for _ in range(200):
            state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            noise += state.to_bytes(8, "little")
        path.write_bytes(b"GGUF\3\0\0\0" + bytes(noise))
        with pytest.raises(ModelError):
            open_model(path)


def test_e11_each_byte_of_the_header_flipped_never_escapes_model_error(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    whole = bytearray(tiny_gguf().read_bytes())
    header_end = min(info.offset for info in read_gguf_header(tiny_gguf()).tensors.values())
    path = tmp_path / "flipped.gguf"
    refused = 0
    for position in range(header_end):
        for flip in (0x01, 0xFF):
            changed = bytearray(whole)
            changed[position] ^= flip
            path.write_bytes(changed)
            try:
                open_model(path)
            except ModelError:
                refused += 1
    assert refused > header_end  # most flips do matter


@pytest.mark.model
def test_demo_model(demo_gguf: Path) -> None:
    header = read_gguf_header(demo_gguf)
    assert len(header.tensors) == 272
    assert header.tensors["token_embd.weight"].shape == (49152, 576)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
