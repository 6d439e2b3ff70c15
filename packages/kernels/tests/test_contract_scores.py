"""The attention contract: right for scores of any size, and for rows that have none."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract_axes import DTYPES, IS_INTERPRETED
from contract_common import BACKENDS, PLAIN, is_exact, unit
from contract_harness import Problem, dense_attention, make_layer

import pagetide_kernels as pk


@BACKENDS
@pytest.mark.parametrize("seq_len", [1, 3, 20])
def test_queries_that_see_no_key_give_zeros(backend: str, device: str, seq_len: int) -> None:
    """More queries than keys: the first of them stand before position 0 (B4)."""
    query_len = seq_len + 3
    metadata = pk.AttentionMetadata.from_host(
        [query_len], [query_len], [[2, 0]], block_size=16, num_blocks=4, device=device
    )
    layer = make_layer(4, 1, 16, 64, "float32", device=device, fill="nan")
    generator = torch.Generator().manual_seed(4)
    k, v, q = torch.randn(3, query_len, 1, 64, generator=generator).to(device)
    pk.store_kv(k, v, layer.k, layer.v, metadata, backend=backend)
    metadata.seq_lens.fill_(seq_len)
    out = pk.paged_attention(q, layer.k, layer.v, metadata, scale=0.125, backend=backend)
    assert (out[:3] == 0).all()
    expected = dense_attention(q[3:], k[:seq_len], v[:seq_len], 0.125)
    torch.testing.assert_close(out[3:], expected, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_float32_is_float32(backend: str, device: str) -> None:
    """No TF32 anywhere: relative error below 1e-5 against float64 (B16)."""
    case = dataclasses.replace(PLAIN, head_dim=128, lengths="ragged")
    problem = Problem(case, device)
    layer = problem.fill_cache(backend, "nan")
    got, exact = problem.attend(backend, layer).double(), problem.dense(layer, torch.float64)
    assert ((got - exact).norm() / exact.norm()).item() < 1e-5


@BACKENDS
def test_a_scale_may_be_negative_or_zero(backend: str, device: str) -> None:
    """Kernels that look for the largest score before they scale it: masked keys stay masked."""
    problem = Problem(PLAIN, device)
    layer = problem.fill_cache("reference", "nan")
    for scale in (-0.25, 0.0):
        problem.scale = scale
        got, exact = problem.attend(backend, layer).double(), problem.dense(layer, torch.float64)
        assert ((got - exact).norm() / exact.norm()).item() < 1e-5


@BACKENDS
@pytest.mark.parametrize(
    "dtypes", [d for d in DTYPES if d[0] != torch.bfloat16 and d[1] != "int8-block"], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128, 160])
def test_steep_scores_raise_a_row_alone(
    backend: str, device: str, dtypes: tuple, head_dim: int
) -> None:
    """Maxima that grow from tile to tile, wherever they do for other tokens' rows."""
    heads = (7, 1) if IS_INTERPRETED else (14, 2)
    case = dataclasses.replace(PLAIN, dtypes=dtypes, heads=heads, head_dim=head_dim, lengths="long")
    problem = Problem(case, device)
    problem.scale *= 8
    layer = problem.fill_cache("reference", "nan")
    got = problem.attend(backend, layer)
    exact = problem.dense(layer, torch.float64)
    same_dtype = problem.dense(layer, problem.query_dtype)
    allowed = 2 * (same_dtype.double() - exact).abs().max().item()
    allowed += unit(problem.query_dtype, exact)
    assert (got.double() - exact).abs().max().item() <= allowed
    if not is_exact(backend, problem.shape, device):
        return
    for factor in (0.0, 4.0):
        q = problem.q[0].clone()
        q[1::2] *= factor
        others = Problem(case, device)
        others.scale, others.q, others.block_tables = problem.scale, [q], problem.block_tables
        assert torch.equal(others.attend(backend, layer)[::2], got[::2])


@BACKENDS
@pytest.mark.parametrize("dtypes", [d for d in DTYPES if d[1] != "int8-block"], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 160])
def test_scores_may_lie_far_below_zero(
    backend: str, device: str, dtypes: tuple, head_dim: int
) -> None:
    """Around -200, where a maximum that began at zero would leave every weight zero."""
    heads = (7, 1) if IS_INTERPRETED else (14, 2)
    case = dataclasses.replace(PLAIN, dtypes=dtypes, heads=heads, head_dim=head_dim)
    problem = Problem(case, device)
    offset = (200 / head_dim**0.5) ** 0.5
    problem.q = [offset + 0.15 * q for q in problem.q]
    problem.k = [-offset + 0.3 * k for k in problem.k]
    layer = problem.fill_cache("reference", "nan")
    got = problem.attend(backend, layer).double()
    exact = problem.dense(layer, torch.float64)
    same_dtype = problem.dense(layer, problem.query_dtype)
    allowed = 2 * (same_dtype.double() - exact).abs().max().item()
    allowed += unit(problem.query_dtype, exact)
    assert (got - exact).abs().max().item() <= allowed


@BACKENDS
def test_small_int8_values_keep_their_precision(backend: str, device: str) -> None:
    """A half-precision weight times a scale of 1e-5 would have few bits left, or none."""
    case = dataclasses.replace(PLAIN, dtypes=(torch.float16, "int8"))
    problem = Problem(case, device)
    problem.v = [v * 2**-10 for v in problem.v]
    layer = problem.fill_cache("reference", "nan")
    got, exact = problem.attend(backend, layer).double(), problem.dense(layer, torch.float64)
    assert ((got - exact).norm() / exact.norm()).item() < 2e-3
