"""The small operations against float64, written out."""

from __future__ import annotations

import math

import pytest
import torch
from contract_harness import backends_here

import pagetide_kernels as pk

DEVICES = sorted({device for _, device in backends_here()})
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.parametrize("device", DEVICES)
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def check(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Within two roundings of the output dtype."""
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=2 * eps, atol=4 * eps)


@BY_DTYPE
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("hidden", [1, 64, 576, 771])
def test_norms(device: str, dtype: torch.dtype, rows: int, hidden: int) -> None:
    x = randn(rows, hidden, dtype=dtype, device=device) * 5
    residual = randn(rows, hidden, dtype=dtype, device=device, seed=1)
    weight = randn(hidden, dtype=dtype, device=device, seed=2)
    bias = randn(hidden, dtype=dtype, device=device, seed=3)

    def exact_rms(x: torch.Tensor) -> torch.Tensor:
        mean_square = x.double().pow(2).mean(-1, keepdim=True)
        return x.double() / (mean_square + 1e-5).sqrt() * weight.double()

    check(pk.rms_norm(x, weight, 1e-5), exact_rms(x), dtype)

    before = residual.clone()
    normed, total = pk.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, before)
    check(total, x.double() + residual.double(), dtype)
    check(normed, exact_rms(total), dtype)

    centred = x.double() - x.double().mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    exact = centred / (variance + 1e-5).sqrt() * weight.double() + bias.double()
    check(pk.layer_norm(x, weight, bias, 1e-5), exact, dtype)


def test_rms_norm_of_large_half_values_does_not_overflow(device: str) -> None:
    x = torch.full((2, 64), 60000.0, dtype=torch.float16, device=device)
    out = pk.rms_norm(x, torch.ones(64, dtype=torch.float16, device=device), 1e-5)
    assert torch.equal(out, torch.ones_like(out))


@BY_DTYPE
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (64, 32), (2, 2)])
def test_rotary(device: str, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    """Each pair (i, i + rotary_dim / 2) is a complex number turned by its angle."""
    half = rotary_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(50, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    positions = torch.tensor([0, 49, 7, 7], device=device)
    q = randn(4, 6, head_dim, dtype=dtype, device=device)
    k = randn(4, 2, head_dim, dtype=dtype, device=device, seed=1)
    both = pk.rotary(torch.cat([q, k], dim=1), positions.int(), pk.rotary_table(cos, sin))
    for x, got in zip((q, k), both.split([6, 2], dim=1), strict=True):
        turned = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
        turn = torch.polar(torch.ones(50, half, dtype=torch.float64), angles).to(device)
        turned = turned * turn[positions][:, None]
        exact = torch.cat([turned.real, turned.imag, x[..., rotary_dim:].double()], dim=-1)
        check(got, exact, dtype)
        assert torch.equal(got[0], x[0])  # position 0 is not turned
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_rotary_keeps_the_precision_of_its_tables(device: str) -> None:
    """Base 10000, dim 32, position 1857, index 1: an angle of 1044.27, not half's 1045 (B18)."""
    angle = 1857 * 10000.0 ** (-1 / 16)
    assert math.isclose(angle, 1044.27, abs_tol=0.01)
    cos = torch.zeros(1858, 16, device=device)
    sin = torch.zeros(1858, 16, device=device)
    cos[1857, 1], sin[1857, 1] = math.cos(angle), math.sin(angle)
    x = torch.zeros(1, 1, 32, dtype=torch.float16, device=device)
    x[..., 1] = 1
    got = pk.rotary(x, torch.tensor([1857], device=device), pk.rotary_table(cos, sin))
    assert abs(got[0, 0, 1].item() - math.cos(angle)) < 5e-4
    assert abs(got[0, 0, 17].item() - math.sin(angle)) < 5e-4


@BY_DTYPE
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 96), (3, 2, 34)])
def test_activations(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=dtype, device=device) * 4
    gate, up = x.double().chunk(2, dim=-1)
    check(pk.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    y = x.double()
    inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
    check(pk.gelu_tanh(x), 0.5 * y * (1 + inner.tanh()), dtype)


def test_bad_arguments(device: str) -> None:
    x = torch.ones(2, 8, device=device)
    with pytest.raises(ValueError, match="weight has shape"):
        pk.rms_norm(x, torch.ones(4, device=device), 1e-5)
    with pytest.raises(ValueError, match="weight has dtype"):
        pk.rms_norm(x, torch.ones(8, device=device).half(), 1e-5)
    with pytest.raises(ValueError, match="residual has shape"):
        pk.add_rms_norm(x, torch.ones(1, 8, device=device), torch.ones(8, device=device), 1e-5)
    with pytest.raises(ValueError, match="bias has shape"):
        pk.layer_norm(x, torch.ones(8, device=device), torch.ones(1, device=device), 1e-5)
    with pytest.raises(ValueError, match="even number"):
        pk.silu_and_mul(torch.ones(2, 7, device=device))
    q = torch.ones(2, 1, 8, device=device)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    angles = torch.ones(4, 5, device=device)
    with pytest.raises(ValueError, match="sin has shape"):
        pk.rotary_table(angles, angles[:2])
    table = pk.rotary_table(angles, angles)
    with pytest.raises(ValueError, match="rotates 10 dimensions"):
        pk.rotary(q, positions, table)
    with pytest.raises(ValueError, match="table has dtype"):
        pk.rotary(q, positions, table.half())
    with pytest.raises(ValueError, match="table has shape"):
        pk.rotary(q, positions, table.flatten(1))
    with pytest.raises(ValueError, match="positions has shape"):
        pk.rotary(q, positions[:1], table[..., :4])
