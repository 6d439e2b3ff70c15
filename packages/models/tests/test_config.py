"""ModelConfig: what it refuses, and how config.json and GGUF keys become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagetide_models import ModelConfig, ModelFormatError, UnsupportedModelError, open_model
from pagetide_models.config import RopeScaling

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=70,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    norm_eps=1e-5,
    rotary_dim=16,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_layers": -1}, "num_layers"),
        ({"head_dim": 1 << 40}, "head_dim"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rotary_dim": 15}, "rotary_dim"),
        ({"rotary_dim": 32}, "rotary_dim"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"layer_windows": (4,)}, "layer_windows"),
        ({"layer_windows": (4, 0)}, "sliding windows"),
        ({"dtype": "int8"}, "dtype"),
        ({"eos_token_ids": (70,)}, "70"),
        ({"bos_token_id": -1}, "-1"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(CONFIG, **change)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.vocab_size = 5  # type: ignore[misc]


def test_derived_sizes() -> None:
    assert (CONFIG.q_size, CONFIG.kv_size) == (128, 32)
    assert CONFIG.window(1) is None
    windows = dataclasses.replace(CONFIG, layer_windows=(None, 4))
    assert [windows.window(0), windows.window(1)] == [None, 4]


def test_token_ids_beyond_the_vocabulary_are_named() -> None:
    CONFIG.check_token_ids([])
    CONFIG.check_token_ids([0, 69])
    # 70..127 would be padding rows of the table, which exist and hold zeros.
    for bad in ([0, 70], [3, -1], [1 << 40]):
        with pytest.raises(ValueError, match=f"{bad[-1]} at index {len(bad) - 1}"):
            CONFIG.check_token_ids(bad)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "ntk"},
        {"kind": "linear", "factor": 0.0},
        {"kind": "yarn", "factor": 4.0},
        {"kind": "llama3", "original_max_position_embeddings": 8, "low_freq_factor": 4.0},
        {"kind": "factors", "frequency_factors": (1.0, 0.0)},
    ],
)
def test_rope_scaling_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope"):
        RopeScaling(**arguments)


def test_config_json(tiny_folder: Callable[..., Path]) -> None:
    config = open_model(tiny_folder()).config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rotary_dim == 16
    assert config.rope_theta == 10_000.0
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings
    assert config.dtype == "float32"


def test_generation_config_says_where_generation_stops(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 5]}')
    assert open_model(folder).config.eos_token_ids == (5, 2)


SCALINGS: list[tuple[dict[str, Any], RopeScaling | None]] = [
    ({}, None),
    ({"rope_scaling": None}, None),
    ({"rope_scaling": {"rope_type": "default"}}, None),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling("linear", 2.0, 128)),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, RopeScaling("dynamic", 2.0, 128)),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 10000.0}},
        RopeScaling("linear", 4.0, 128),
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        RopeScaling("llama3", 8.0, 32, 1.0, 4.0),
    ),
]


@pytest.mark.parametrize(("keys", "expected"), SCALINGS)
def test_rope_spellings(
    tiny_folder: Callable[..., Path], keys: dict[str, Any], expected: RopeScaling | None
) -> None:
    assert open_model(tiny_folder(keys)).config.rope_scaling == expected


def test_yarn_magnitude(tiny_folder: Callable[..., Path]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    scaling = open_model(tiny_folder({"rope_scaling": yarn})).config.rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    given = open_model(tiny_folder({"rope_scaling": {**yarn, "attention_factor": 1.5}}))
    assert given.config.rope_scaling is not None
    assert given.config.rope_scaling.attention_factor == 1.5


@pytest.mark.parametrize(
    ("keys", "error", "named"),
    [
        ({"hidden_size": None}, ModelFormatError, "hidden_size is missing"),
        ({"hidden_size": "64"}, ModelFormatError, "hidden_size should be an integer"),
        ({"hidden_size": True}, ModelFormatError, "hidden_size should be an integer"),
        ({"num_attention_heads": 0}, ModelFormatError, "num_attention_heads"),
        ({"num_key_value_heads": 3}, ModelFormatError, "num_kv_heads 3"),
        ({"attention_bias": 1}, ModelFormatError, "attention_bias should be true or false"),
        ({"rms_norm_eps": "small"}, ModelFormatError, "rms_norm_eps should be a number"),
        ({"eos_token_id": ["</s>"]}, ModelFormatError, "eos_token_id"),
        ({"eos_token_id": 4000}, ModelFormatError, "4000"),
        ({"rope_scaling": {"rope_type": "longrope"}}, UnsupportedModelError, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, ModelFormatError, "factor is missing"),
        ({"rope_scaling": []}, ModelFormatError, "rope_scaling should be an object"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "relu"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
        ({"model_type": "mamba"}, UnsupportedModelError, "mamba"),
        ({"model_type": None}, ModelFormatError, "model_type is missing"),
        ({"num_hidden_layers": 2_000_000_000}, ModelFormatError, "2000000000 layers"),
    ],
)
def test_bad_config_json_names_file_and_key(
    tiny_folder: Callable[..., Path], keys: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=r"config\.json|model") as caught:
        open_model(tiny_folder(keys))
    assert named in str(caught.value)


def test_gguf_keys(tiny_gguf: Callable[..., Path]) -> None:
    config = open_model(tiny_gguf()).config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 8, 2)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (16, 70, 128)
    assert config.bos_token_id == 1
    assert config.eos_token_ids == (2,)
    assert config.pad_token_id is None
    assert config.tie_word_embeddings
    eot = open_model(tiny_gguf({"tokenizer.ggml.eot_token_id": 7})).config
    assert eot.eos_token_ids == (2, 7)
    untied = open_model(tiny_gguf(tensors={"output.weight": (70, 64)})).config
    assert not untied.tie_word_embeddings


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 3_000_000_000}, "num_layers"),
        ({"llama.block_count": 2_000_000_000}, "2000000000 layers"),
        ({"llama.attention.head_count": [8, 8]}, "llama.attention.head_count should be"),
        ({"llama.attention.value_length": 32}, "differ in length"),
        ({"llama.vocab_size": 71}, "llama.vocab_size"),
        ({"llama.rope.dimension_count": 8}, "rotating 8 of 16"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.embedding_length": 63}, "token_embd.weight"),
    ],
)
def test_bad_gguf_keys_name_file_and_key(
    tiny_gguf: Callable[..., Path], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=r"tiny\.gguf") as caught:
        open_model(tiny_gguf(keys))
    assert named in str(caught.value)


def test_gguf_rope_factors_are_part_of_the_configuration(
    tmp_path: Path, gguf_builder: Any, tiny_gguf: Callable[..., Path]
) -> None:
    import struct

    from pagetide_models.gguf import read_gguf_header

    path = tiny_gguf(tensors={"rope_freqs.weight": (8,)})
    with pytest.raises(ModelFormatError, match="rope_freqs"):  # zeros would divide by zero
        open_model(path)
    info = read_gguf_header(path).tensors["rope_freqs.weight"]
    raw = bytearray(path.read_bytes())
    raw[info.offset : info.offset + 32] = struct.pack("<8f", *[1.0] * 4, *[8.0] * 4)
    path.write_bytes(raw)
    scaling = open_model(path).config.rope_scaling
    assert scaling == RopeScaling("factors", frequency_factors=(1.0,) * 4 + (8.0,) * 4)
    with pytest.raises(ModelFormatError, match="should hold 8 F32 values"):
        open_model(tiny_gguf(tensors={"rope_freqs.weight": (7,)}))
