"""open_model: what it finds, what it refuses, in words that help, and all of it without torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagetide_models import (
    ModelError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
    open_model,
)
from pagetide_models.hub import is_hub_id
from pagetide_models.safetensors import read_safetensors_header


def test_a_gguf_file(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf()
    for spelling in (path, str(path)):
        source = open_model(spelling)
        assert source.path == path
        assert source.checkpoint_format == "gguf"
        assert source.num_bytes == sum(info.num_bytes for info in source.tensors.values())


def test_a_gguf_file_is_known_by_content_not_by_name(tiny_gguf: Callable[..., Path]) -> None:
    assert open_model(tiny_gguf(name="model.dat")).checkpoint_format == "gguf"


def test_a_folder(tiny_folder: Callable[..., Path]) -> None:
    source = open_model(tiny_folder())
    assert source.checkpoint_format == "safetensors"
    assert len(source.tensors) == 11


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_model(tmp_path / "missing.gguf")
    with pytest.raises(FileNotFoundError):  # for callers who know only the standard errors
        open_model("./missing")


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("gpt2", True),
        ("org/name", True),
        ("org/name-1.5_x", True),
        ("org/name/file.gguf", True),
        ("model.gguf", False),
        ("folder/model.gguf", False),
        ("./name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("-rf", False),
        ("org/na me", False),
        ("../x", False),
        ("", False),
    ],
)
def test_what_looks_like_a_hub_id(text: str, is_id: bool) -> None:
    assert is_hub_id(text) == is_id


def test_a_hub_id_without_network_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    calls: list[tuple[str, Any]] = []

    def unreachable(repo: str, revision: str | None = None, **_: Any) -> str:
        calls.append((repo, revision))
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFoundError, match=r"cannot be reached.*hf download some/model"):
        open_model("some/model", revision="v2")
    assert calls == [("some/model", "v2")]


def test_hub_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    errors = huggingface_hub.errors

    def raising(error: type[Exception]) -> Callable[..., str]:
        def download(*_: Any, **__: Any) -> str:
            raise error.__new__(error)

        return download

    for error, words in [
        (errors.RepositoryNotFoundError, "no such model"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.GatedRepoError, "gated"),
        (ConnectionError, "cannot be reached"),
    ]:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(error))
        with pytest.raises(ModelNotFoundError, match=words):
            open_model("some/model")


def test_a_downloaded_folder_is_opened(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    folder = tiny_folder()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    assert open_model("some/model").path == folder


def test_a_text_file_called_gguf(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("I am not a model")
    with pytest.raises(ModelFormatError, match=r"notes\.gguf: not a GGUF file"):
        open_model(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "y.ckpt", "z.PKL"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ModelFormatError, match="pickle can run any code"):
        open_model(path)


def test_a_folder_of_pickles_is_refused(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="pickle can run any code"):
        open_model(folder)


def test_a_folder_without_configuration(tmp_path: Path, tiny_gguf: Callable[..., Path]) -> None:
    gguf = tiny_gguf()
    with pytest.raises(ModelNotFoundError, match=r"without config\.json.*tiny\.gguf"):
        open_model(gguf.parent)


def test_a_safetensors_file_points_to_its_folder(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    with pytest.raises(ModelFormatError, match="give the folder"):
        open_model(folder / "model.safetensors")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\xff", "[" * 100_000])
def test_config_json_that_is_none(tiny_folder: Callable[..., Path], text: str) -> None:
    folder = tiny_folder()
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        open_model(folder)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.norm.weight": None}, "missing tensor 'model.norm.weight'"),
        ({"model.extra.weight": (3,)}, "unknown tensor 'model.extra.weight'"),
        ({"model.norm.weight": (63,)}, "'model.norm.weight' has shape [63]"),
        ({"model.embed_tokens.weight": (64, 70)}, "'model.embed_tokens.weight' has shape [64, 70]"),
        ({"model.layers.0.self_attn.q_proj.bias": (64,)}, "unknown tensor"),
        ({"lm_head.weight": (71, 64)}, "'lm_head.weight' has shape [71, 64]"),
    ],
)
def test_e2_wrong_tensors_are_named_with_their_file(
    tiny_folder: Callable[..., Path], tensors: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelFormatError) as caught:
        open_model(tiny_folder(tensors=tensors))
    assert words in str(caught.value)
    assert "model" in str(caught.value)


def test_e1_untied_and_absent_head_is_an_error(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ModelFormatError, match=r"missing tensor 'lm_head\.weight'"):
        open_model(tiny_folder({"tie_word_embeddings": False}))


def test_gguf_tensor_errors(tiny_gguf: Callable[..., Path]) -> None:
    with pytest.raises(ModelFormatError, match=r"tiny\.gguf.*missing tensor 'output_norm\.weight'"):
        open_model(tiny_gguf(tensors={"output_norm.weight": None}))
    with pytest.raises(ModelFormatError, match=r"unknown tensor 'blk\.7\.attn_q\.weight'"):
        open_model(tiny_gguf(tensors={"blk.7.attn_q.weight": (128, 64)}))
    with pytest.raises(ModelFormatError, match="token_embd"):
        open_model(tiny_gguf(tensors={"token_embd.weight": None}))


def test_an_encoding_that_cannot_be_read(
    tmp_path: Path, gguf_builder: Any, tiny_gguf_content: Any
) -> None:
    metadata, shapes = tiny_gguf_content
    head = gguf_builder.head(len(shapes), len(metadata)) + gguf_builder.pairs(metadata)
    for name, shape in shapes.items():
        head += gguf_builder.entry(name, shape[::-1], 16, 0)  # IQ2_XXS
    path = tmp_path / "iq2.gguf"
    path.write_bytes(head + bytes(64))
    with pytest.raises(UnsupportedModelError, match=r"iq2\.gguf.*IQ2_XXS"):
        open_model(path)


def _shard(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_decides_which_files_count(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    names = list(read_safetensors_header(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "stray.safetensors").write_bytes(b"garbage")
    _shard(folder, dict.fromkeys(names, "a.safetensors"))
    assert len(open_model(folder).tensors) == 11


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", 5, "a\\b", None]
)
def test_shards_are_plain_names_in_the_folder(
    tiny_folder: Callable[..., Path], shard: object
) -> None:
    folder = tiny_folder()
    _shard(folder, {"model.norm.weight": shard})
    with pytest.raises(ModelFormatError, match="not a plain file name"):
        open_model(folder)


def test_e2_a_missing_shard_is_named(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    names = list(read_safetensors_header(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    _shard(folder, {**dict.fromkeys(names, "a.safetensors"), "model.norm.weight": "b.safetensors"})
    with pytest.raises(ModelFormatError, match=r"shard 'b\.safetensors'.*is missing"):
        open_model(folder)
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(ModelFormatError, match="as well"):
        open_model(folder)


def test_safetensors_cut_at_every_byte_of_the_header(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_folder()
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in [*range(header_end + 1), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
            open_model(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"w": 1}',
        b'{"w": {"dtype": "F32", "shape": [1]}}',
        b'{"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [4611686018427387903], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [100000, 100004]}}',
        b'{"w": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "w": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}}',
    ],
)
def test_damaged_safetensors_headers(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ModelFormatError, match=r"bad\.safetensors"):
        read_safetensors_header(path)


def test_a_huge_safetensors_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 1 << 33))
        file.truncate(1 << 34)  # sparse: the header would fit the file
    with pytest.raises(ModelFormatError, match=r"huge\.safetensors"):
        read_safetensors_header(path)


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        open_model(tmp_path / "pipe.gguf")


def test_a_file_that_may_not_be_read(
    tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf()

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)  # root, who runs tests in containers, may read all
    with pytest.raises(ModelNotFoundError, match="cannot be read: Permission denied"):
        open_model(path)


def test_opening_imports_nothing_heavy(
    tiny_gguf: Callable[..., Path],
    tiny_folder: Callable[..., Path],
    run_python: Callable[[str], str],
) -> None:
    printed = run_python(
        "import sys, pagetide_models\n"
        "assert pagetide_models.ModelConfig and pagetide_models.register_model\n"
        f"pagetide_models.open_model({str(tiny_gguf())!r})\n"
        f"pagetide_models.open_model({str(tiny_folder())!r})\n"
        "heavy = ['torch', 'numpy', 'tokenizers', 'jinja2', 'gguf', 'huggingface_hub', 'tqdm',\n"
        "         'pagetide_kernels', 'safetensors', 'transformers']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert printed.strip() == "[]"


def test_every_refusal_is_a_model_error(tmp_path: Path) -> None:
    assert issubclass(ModelFormatError, ModelError)
    assert issubclass(ModelFormatError, ValueError)
    assert issubclass(UnsupportedModelError, ModelError)
    assert issubclass(ModelNotFoundError, ModelError)
