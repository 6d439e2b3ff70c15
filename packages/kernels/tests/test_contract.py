"""The attention contract, asserted of every back end that works on this machine.

A back end that declares a shape unsupported must refuse it by ``UnsupportedError``; everything else
it must get right. ``PAGETIDE_BACKENDS=triton,cuda`` narrows the back ends,
``PAGETIDE_CONTRACT_CASES`` sets the number of cases. Here: cases of all axes, and what is read and
written where. What scores and lengths do to precision is in ``test_contract_scores.py``, what
other sequences must not do in ``test_contract_company.py``, thousands of steps on a GPU in
``test_contract_gpu.py``.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from contract_axes import DTYPES, IS_INTERPRETED, Case, contract_cases
from contract_common import BACKENDS, PLAIN, unit
from contract_harness import Problem, context_writer, make_layer, num_contract_cases, read_back

import pagetide_kernels as pk


@BACKENDS
@pytest.mark.parametrize("case", contract_cases(num_contract_cases()), ids=str)
def test_case(backend: str, device: str, case: Case) -> None:
    """Within twice PyTorch's own error of dense attention in float64; no unowned byte matters."""
    problem = Problem(case, device)
    try:
        pk.select_backend(backend, problem.shape, device)
    except pk.UnsupportedError:
        layer = problem.fill_cache("reference", "zero")
        with pytest.raises(pk.UnsupportedError):
            problem.attend(backend, layer)
        return
    clean = problem.fill_cache(backend, "zero")
    got = problem.attend(backend, clean)

    poisoned = problem.fill_cache(backend, case.poison)
    assert torch.equal(problem.attend(backend, poisoned), got), "unowned memory leaks"

    exact = problem.dense(clean, torch.float64)
    same_dtype = problem.dense(clean, problem.query_dtype)
    assert got.dtype == problem.query_dtype
    error = (got.double() - exact).abs().max().item()
    allowed = 2 * (same_dtype.double() - exact).abs().max().item()
    allowed += unit(problem.query_dtype, exact)
    assert error <= allowed

    if backend == "cpu" and problem.query_dtype == torch.float32:
        assert (got - problem.attend("reference", clean)).abs().max() <= 1e-5


@BACKENDS
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_stores_every_token_and_nothing_else(backend: str, device: str, dtypes: tuple) -> None:
    """Floats arrive rounded once, INT8 within half a step of its scale; other bytes stay."""
    for layout in ("kvcache", "slots_first", "heads_first"):
        problem = Problem(
            dataclasses.replace(PLAIN, dtypes=dtypes, layout=layout, lengths="padded"), device
        )
        layer = problem.fill_cache(backend, "7f")
        is_owned = torch.zeros(problem.num_blocks, PLAIN.block_size, dtype=torch.bool)
        for table, (_, seq_len) in zip(problem.block_tables, problem.sequences, strict=True):
            for position in range(seq_len):
                is_owned[table[position // 16], position % 16] = True
        for xs, cache, scales in (
            (problem.k, layer.k, layer.k_scales),
            (problem.v, layer.v, layer.v_scales),
        ):
            unowned = cache.transpose(1, 2)[~is_owned.to(device)].contiguous()
            assert (unowned.view(torch.uint8) == 0x7F).all()
            for x, table in zip(xs, problem.block_tables, strict=True):
                stored = read_back(cache, scales, table, len(x))
                if scales is None:
                    assert torch.equal(stored, x.to(cache.dtype).double())
                    continue
                positions = torch.arange(len(x), device=device)
                blocks = torch.tensor(table, device=device)[positions // 16]
                step = scales[blocks, :, positions % 16, None].double()
                if dtypes[1] == "int8":
                    amax = x.double().abs().amax(-1, keepdim=True)
                    torch.testing.assert_close(step, amax / 127, rtol=1e-6, atol=0)
                    assert ((stored - x.double()).abs() <= 0.5001 * step).all()
                else:  # rounded again at most once for each of the three steps that stored
                    assert ((stored - x.double()).abs() <= 1.5001 * step).all()


@BACKENDS
@pytest.mark.parametrize("query_len", [1, 3, 10, 20])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_p1_zero_queries_average_what_is_visible(
    backend: str, device: str, query_len: int, dtypes: tuple
) -> None:
    """With q = 0 and V[t] = t the output is the mean of the visible indices, at every length."""
    seq_lens = list(range(query_len, max(3 * 16 + 1, query_len) + 1))
    if IS_INTERPRETED:  # where a block ends, and where it does not
        seq_lens = [n for n in seq_lens if n in (query_len, 5, 15, 16, 17, 31, 32, 33, 48, 49)]
    count, blocks = len(seq_lens), 4
    metadata = pk.AttentionMetadata.from_host(
        [query_len] * count, seq_lens, [range(i * blocks, (i + 1) * blocks) for i in range(count)],
        block_size=16, num_blocks=count * blocks, device=device,
    )  # fmt: skip
    layer = make_layer(count * blocks, 1, 16, 64, dtypes[1], device=device, fill="nan")
    all_keys = pk.AttentionMetadata.from_host(
        seq_lens, seq_lens, [range(i * blocks, (i + 1) * blocks) for i in range(count)],
        block_size=16, num_blocks=count * blocks, device=device,
    )  # fmt: skip
    values = torch.cat([torch.arange(n) for n in seq_lens]).to(device, dtypes[0])
    values = values[:, None, None].expand(-1, 1, 64).contiguous()
    pk.store_kv(
        values, values, layer.k, layer.v, all_keys, **layer.scales, backend=context_writer(backend)
    )

    for window in (None, 5):
        q = torch.zeros(count * query_len, 2, 64, dtype=dtypes[0], device=device)
        out = pk.paged_attention(
            q, layer.k, layer.v, metadata, scale=1.0, **layer.scales, window=window, backend=backend
        )
        # Query at position p sees first..p, whose mean is (first + p) / 2.
        positions = torch.tensor([n - query_len + j for n in seq_lens for j in range(query_len)])
        first = torch.zeros_like(positions) if window is None else (positions - 4).clamp(min=0)
        expected = ((first + positions) / 2)[:, None, None].expand(-1, 2, 64)
        # A block's single scale rounds the smallest of its values most: by half of 48 / 127.
        absolute = 0.25 if dtypes[1] == "int8-block" else 1e-5
        torch.testing.assert_close(
            out.double().cpu(),
            expected.double(),
            rtol=4 * torch.finfo(dtypes[0]).eps,
            atol=absolute,
        )


@BACKENDS
@pytest.mark.parametrize(
    "heads", [(14, 2), (28, 4), (32, 8), (9, 3), (12, 12), (48, 2), (40, 2), (7, 7), (7, 1), (8, 1)]
)
def test_p2_each_query_head_reads_its_kv_head(
    backend: str, device: str, heads: tuple[int, int]
) -> None:
    """With V = the KV head's index, query head h gives h // group, in decode and in prefill."""
    num_heads, num_kv_heads = heads
    metadata = pk.AttentionMetadata.from_host(
        [1, 24, 3], [20, 24, 40], [[5, 1], [4, 2], [0, 6, 3]],
        block_size=16, num_blocks=8, device=device,
    )  # fmt: skip
    layer = make_layer(8, num_kv_heads, 16, 64, "float32", device=device, fill="nan")
    generator = torch.Generator().manual_seed(0)
    for table, seq_len in ([5, 1], 20), ([4, 2], 24), ([0, 6, 3], 40):
        for position in range(seq_len):
            block, slot = table[position // 16], position % 16
            layer.k[block, :, slot] = torch.randn(num_kv_heads, 64, generator=generator).to(device)
            layer.v[block, :, slot] = torch.arange(num_kv_heads, device=device)[:, None].float()
    q = torch.randn(28, num_heads, 64, generator=generator).to(device)
    out = pk.paged_attention(q, layer.k, layer.v, metadata, scale=0.125, backend=backend)
    expected = torch.arange(num_heads, device=device).div(
        num_heads // num_kv_heads, rounding_mode="floor"
    )
    torch.testing.assert_close(
        out, expected.float()[None, :, None].expand(28, -1, 64), rtol=1e-6, atol=1e-6
    )


@BACKENDS
@pytest.mark.parametrize("layout", ["kvcache", "slots_first", "heads_first"])
def test_p4_a_peaked_key_returns_its_own_value(backend: str, device: str, layout: str) -> None:
    """A query equal to the key of token t, strongly scaled, returns V[t]: addressing by slot."""
    peaks = [0, 15, 16, 17, 31, 32, 47, 48] if IS_INTERPRETED else list(range(49))
    seq_len, count = 49, len(peaks)
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(count * 4, generator=generator).view(count, 4).tolist()
    metadata = pk.AttentionMetadata.from_host(
        [1] * count, [seq_len] * count, tables,
        block_size=16, num_blocks=count * 4, device=device,
    )  # fmt: skip
    layer = make_layer(count * 4, 2, 16, 64, "float32", device=device, layout=layout, fill="inf")
    k = torch.randn(count, seq_len, 2, 64, generator=generator).sign().to(device)
    v = torch.randn(count, seq_len, 2, 64, generator=generator).to(device)
    for position in range(seq_len):
        blocks = torch.tensor([table[position // 16] for table in tables], device=device)
        layer.k[blocks, :, position % 16] = k[:, position]
        layer.v[blocks, :, position % 16] = v[:, position]
    sequences, targets = torch.arange(count, device=device), torch.tensor(peaks, device=device)
    q = k[sequences, targets].repeat_interleave(3, dim=1)
    out = pk.paged_attention(q, layer.k, layer.v, metadata, scale=4.0, backend=backend)
    torch.testing.assert_close(
        out, v[sequences, targets].repeat_interleave(3, dim=1), rtol=1e-5, atol=1e-5
    )


@BACKENDS
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_any_order_of_the_caches_dimensions(backend: str, device: str, order: tuple) -> None:
    """A launcher that swaps two strides gets head 0 right and the rest wrong (B1)."""
    problem = Problem(PLAIN, device)
    plain = problem.fill_cache("reference", "nan")
    expected = problem.attend("reference", plain)
    inverse = [order.index(i) for i in range(3)]
    strided = make_layer(problem.num_blocks, 3, 16, 64, "float32", device=device)
    for name in ("k", "v"):
        stored = getattr(plain, name).permute(*order, 3).contiguous()
        setattr(strided, name, stored.permute(*inverse, 3))
    got = problem.attend(backend, strided)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("dtypes", "head_dim"),
    [((torch.float32, "float32"), 40), ((torch.float32, "int8"), 64),
     ((torch.float16, "float16"), 72), ((torch.bfloat16, "bfloat16"), 256),
     *([] if IS_INTERPRETED else [((torch.float16, "float16"), 64)])],
    ids=str,
)  # fmt: skip
def test_tiles_and_blocks_need_not_fit(
    backend: str, device: str, dtypes: tuple, head_dim: int, block_size: int
) -> None:
    """A tile of several blocks, a block of several tiles, and ends within both, of windows too."""
    case = dataclasses.replace(
        PLAIN, dtypes=dtypes, heads=(3, 1), head_dim=head_dim, block_size=block_size,
        window=100 if block_size == 64 else None,
    )  # fmt: skip
    problem = Problem(case, device, sequences=[(1, 165), (20, 150), (1, 97), (17, 64)])
    layer = problem.fill_cache("reference", "nan")
    got, exact = problem.attend(backend, layer), problem.dense(layer, torch.float64)
    same_dtype = problem.dense(layer, problem.query_dtype)
    allowed = 2 * (same_dtype.double() - exact).abs().max() + unit(problem.query_dtype, exact)
    assert (got.double() - exact).abs().max() <= allowed


@BACKENDS
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_keys_and_values_may_be_strided_differently(
    backend: str, device: str, kv_dtype: str
) -> None:
    problem = Problem(dataclasses.replace(PLAIN, dtypes=(torch.float32, kv_dtype)), device)
    layer = problem.fill_cache("reference", "nan")
    expected = problem.attend("reference", layer)
    other = problem.fill_cache("reference", "inf")
    other.v = layer.v.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    torch.testing.assert_close(problem.attend(backend, other), expected, rtol=1e-5, atol=1e-5)

    fresh = make_layer(problem.num_blocks, 3, 16, 64, kv_dtype, device=device)
    fresh.v = fresh.v.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    stops = [s for _, s in problem.sequences]
    pk.store_kv(
        torch.cat(problem.k), torch.cat(problem.v), fresh.k, fresh.v,
        problem.step([0] * len(stops), stops), **fresh.scales, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(problem.attend("reference", fresh), expected, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_queries_and_output_may_be_slices_of_a_fused_projection(backend: str, device: str) -> None:
    problem = Problem(PLAIN, device)
    layer = problem.fill_cache("reference", "nan")
    q = problem.queries()
    fused = torch.full((len(q), 15, 64), torch.nan, device=device)
    fused[:, 2:11] = q
    target = torch.full((len(q), 11, 64), 7.0, device=device)
    out = pk.paged_attention(
        fused[:, 2:11], layer.k, layer.v, problem.metadata(), scale=problem.scale,
        backend=backend, out=target[:, 1:10],
    )  # fmt: skip
    assert out.data_ptr() == target[:, 1:10].data_ptr()
    torch.testing.assert_close(out, problem.attend("reference", layer), rtol=1e-5, atol=1e-5)
    assert (target[:, 0] == 7).all()
    assert (target[:, 10] == 7).all()

    k, v = torch.cat(problem.k), torch.cat(problem.v)
    fused = torch.cat([k, v], dim=1)
    fresh = make_layer(problem.num_blocks, 3, 16, 64, "float32", device=device)
    stops = [s for _, s in problem.sequences]
    metadata = problem.step([0] * len(stops), stops)
    pk.store_kv(fused[:, :3], fused[:, 3:], fresh.k, fresh.v, metadata, backend=backend)
    torch.testing.assert_close(problem.attend("reference", fresh), out, rtol=1e-5, atol=1e-5)
