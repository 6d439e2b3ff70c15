"""Rotary scaling as config.json and GGUF files write it, in all their spellings."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from pagetide_models.config import RopeScaling
from pagetide_models.errors import ModelFormatError, UnsupportedModelError
from pagetide_models.fields import Fields
from pagetide_models.tensors import TensorInfo

__all__ = ["rope_from_gguf", "rope_from_json"]

ROPE_FACTORS_TENSOR = "rope_freqs.weight"


def rope_from_json(
    fields: Fields, max_position_embeddings: int, default_theta: float = 10_000.0
) -> tuple[float, RopeScaling | None]:
    """The base frequency and the scaling of a config.json.

    Newer files hold both in ``rope_parameters``; older ones have ``rope_theta`` beside
    ``rope_scaling``, whose rule is called ``type`` in the oldest.
    """
    theta = fields.number("rope_theta", default_theta)
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    if section is None:
        return theta, None
    theta = section.number("rope_theta", theta)
    kind = section.text("rope_type", section.text("type", "default"))
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.path}: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    original = fields.integer(
        "original_max_position_embeddings",
        section.integer("original_max_position_embeddings", max_position_embeddings),
    )
    if kind in ("linear", "dynamic"):
        return theta, RopeScaling(
            kind=kind,  # type: ignore[arg-type]
            factor=section.number("factor"),
            original_max_position_embeddings=max_position_embeddings,
        )
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=section.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = section.number("factor", max_position_embeddings / original)
        return theta, RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=section.number("beta_fast", 32.0) or 32.0,
            beta_slow=section.number("beta_slow", 1.0) or 1.0,
            truncate=section.boolean("truncate", True),
            attention_factor=_yarn_attention_factor(section, factor),
        )
    raise UnsupportedModelError(
        f"{fields.path}: rope scaling {kind!r} is not supported; "
        "these are: default, linear, dynamic, llama3, yarn"
    )


def _yarn_attention_factor(section: Fields, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if section.get("attention_factor") is not None:
        return section.number("attention_factor")
    over, under = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    return magnitude(over) / magnitude(under) if over and under else magnitude(1.0)


def rope_from_gguf(
    fields: Fields, tensors: Mapping[str, TensorInfo], rotary_dim: int
) -> tuple[float, RopeScaling | None]:
    """The base frequency and the scaling of a GGUF file.

    llama3 files carry their rule as the tensor ``rope_freqs.weight``: it is small, and read here so
    that the configuration is complete.
    """
    theta = fields.number("rope.freq_base", 10_000.0)
    if ROPE_FACTORS_TENSOR in tensors:
        factors = _read_factors(tensors[ROPE_FACTORS_TENSOR], rotary_dim // 2)
        return theta, RopeScaling(kind="factors", frequency_factors=factors)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return theta, None
    context = fields.integer("context_length")
    original = fields.integer("rope.scaling.original_context_length", context)
    factor = fields.number("rope.scaling.factor", context / original)
    if kind == "linear":
        return theta, RopeScaling("linear", factor, original)
    if kind == "yarn":
        magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        return theta, RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * magnitude,
        )
    raise UnsupportedModelError(
        f"{fields.path}: rope scaling {kind!r} is not supported; these are: none, linear, yarn"
    )


def _read_factors(info: TensorInfo, count: int) -> tuple[float, ...]:
    if info.encoding != "F32" or info.shape != (count,):
        raise ModelFormatError(
            f"{info.path}: tensor {info.name!r} should hold {count} F32 values, "
            f"not {list(info.shape)} of {info.encoding}"
        )
    with open(info.path, "rb") as file:
        file.seek(info.offset)
        factors = struct.unpack(f"<{count}f", file.read(info.num_bytes))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelFormatError(f"{info.path}: tensor {info.name!r} holds a factor that is not > 0")
    return factors
