"""B18: rotary angles in full precision, whatever the model's dtype, for every scaling rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_models import ModelConfig, load_model  # noqa: E402
from pagetide_models.config import RopeScaling  # noqa: E402
from pagetide_models.rope import RotaryEmbedding, inverse_frequencies  # noqa: E402

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=32_768,
    norm_eps=1e-5,
    rotary_dim=32,
)


def test_b18_a_known_angle() -> None:
    # dim 32, base 10000, position 1857, pair 1: 1857 / 10000^(2/32) = 1044.27; half gives 1045.
    frequency = float(inverse_frequencies(10_000.0, 32, None)[1])
    assert 1857 * frequency == pytest.approx(1044.27, abs=0.005)
    rotary = RotaryEmbedding(CONFIG, torch.device("cpu"))
    assert float(rotary.cos[1857, 1]) == pytest.approx(math.cos(1857 * frequency), abs=1e-7)


def test_b18_tables_are_exact_up_to_32767() -> None:
    rotary = RotaryEmbedding(CONFIG, torch.device("cpu"))
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    assert rotary.cos.shape == (32_768, 16)
    positions = [0, 1, 255, 256, 257, 1857, 15_962, 32_767]
    for position in positions:
        for pair in range(16):
            angle = position * 10_000.0 ** (-pair / 16)
            assert abs(float(rotary.cos[position, pair]) - math.cos(angle)) < 1e-6
            assert abs(float(rotary.sin[position, pair]) - math.sin(angle)) < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_b18_the_models_dtype_does_not_reach_the_tables(
    tiny_folder: Callable[..., Path], dtype: str
) -> None:
    model = load_model(tiny_folder(), dtype=dtype)
    rotary: Any = model.layers[0].attention.rotary
    assert rotary.cos.dtype == torch.float32
    expected = RotaryEmbedding(model.config, torch.device("cpu"))
    assert torch.equal(rotary.cos, expected.cos)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_every_rule_is_that_of_transformers(kind: str) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils", reason="the oracle")
    transformers = pytest.importorskip("transformers", reason="the oracle")
    given: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0}
    if kind in ("llama3", "yarn"):
        given["original_max_position_embeddings"] = 512
    if kind == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=given
    )
    expected, magnitude = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, None)
    scaling = RopeScaling(
        kind,  # type: ignore[arg-type]
        factor=4.0,
        original_max_position_embeddings=given.get("original_max_position_embeddings", 2048),
        attention_factor=0.1 * math.log(4) + 1 if kind == "yarn" else 1.0,
    )
    actual = inverse_frequencies(10_000.0, 128, scaling)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-6, atol=0)
    assert scaling.attention_factor == pytest.approx(magnitude)


def test_factors_divide_each_frequency() -> None:
    plain = inverse_frequencies(10_000.0, 8, None)
    factors = (1.0, 2.0, 4.0, 8.0)
    scaled = inverse_frequencies(10_000.0, 8, RopeScaling("factors", frequency_factors=factors))
    torch.testing.assert_close(scaled * torch.tensor(factors, dtype=torch.float64), plain)


def test_yarn_magnitude_scales_the_tables() -> None:
    scaling = RopeScaling("yarn", 1.0, 128, attention_factor=1.5)
    config = dataclasses.replace(CONFIG, rope_scaling=scaling, max_position_embeddings=4)
    rotary = RotaryEmbedding(config, torch.device("cpu"))
    torch.testing.assert_close(rotary.cos[0], torch.full((16,), 1.5))
