"""The attention contract, asserted of every back end that works on this machine.

A back end that declares a shape unsupported must refuse it by ``UnsupportedError``; everything else
it must get right. ``PAGETIDE_BACKENDS=triton,cuda`` narrows the back ends,
``PAGETIDE_CONTRACT_CASES`` sets the number of cases.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from contract_axes import DTYPES, IS_INTERPRETED, Case, contract_cases
from contract_gpu import (
    SPECIALISATIONS,
    Buffers,
    Specialisation,
    check_step,
    num_compiled,
    random_step,
)
from contract_harness import (
    Problem,
    backends_here,
    context_writer,
    dense_attention,
    make_layer,
    num_contract_cases,
    pad,
    read_back,
)

import pagetide_kernels as pk
from pagetide_kvcache import BlockCopy, KVCacheSpec
from pagetide_kvcache.storage import KVCache

BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), backends_here(), ids=lambda value: str(value)
)
PLAIN = Case(
    dtypes=(torch.float32, "float32"), heads=(9, 3), head_dim=64, block_size=16, lengths="mixed",
    window=None, soft_cap=None, layout="kvcache", poison="nan",
)  # fmt: skip
# Beyond the kernels' tiles and splits: several leaves, of one tile and of two, whole and cut.
LONG = [(1, 700), (1, 130), (1, 2100), (2, 400)]


def is_exact(backend: str, shape: pk.AttentionShape, device: str) -> bool:
    return pk.select_backend(backend, shape, device).is_exact


def unit(dtype: torch.dtype, like: torch.Tensor) -> float:
    """One unit in the last place of ``dtype`` at the largest magnitude of ``like``."""
    return torch.finfo(dtype).eps * max(1e-6, like.abs().max().item())


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


@BACKENDS
@pytest.mark.parametrize("dtypes", [d for d in DTYPES if d[1] != "int8-block"], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_exactness_level_1(backend: str, device: str, dtypes: tuple, window: int | None) -> None:
    """Alone, in company, in another order, padded, in other blocks: a token's bits are the same."""
    heads = (7, 1) if IS_INTERPRETED else (14, 2)
    case = dataclasses.replace(PLAIN, dtypes=dtypes, window=window, heads=heads)
    problem = Problem(case, device)
    layer = problem.fill_cache("reference", "nan")
    together = problem.attend(backend, layer).split([n for n, _ in problem.sequences])

    moved = Problem(case, device)
    moved.block_tables = [[(b + 5) % moved.num_blocks for b in t] for t in moved.block_tables]
    elsewhere = moved.attend(backend, moved.fill_cache("reference", "inf"))

    def attend(indices: list[int], *, padded: bool) -> torch.Tensor:
        metadata = pk.AttentionMetadata.from_host(
            [problem.sequences[i][0] for i in indices],
            [problem.sequences[i][1] for i in indices],
            [problem.block_tables[i] for i in indices],
            block_size=16, num_blocks=problem.num_blocks, device=device,
        )  # fmt: skip
        q = torch.cat([problem.q[i] for i in indices])
        if padded:
            metadata = pad(metadata, num_seqs=3, num_tokens=5)
            q = torch.cat([q, torch.full_like(q[:1], torch.nan).expand(5, -1, -1)])
        return pk.paged_attention(
            q, layer.k, layer.v, metadata, scale=problem.scale, **layer.scales,
            window=window, backend=backend,
        )  # fmt: skip

    order = sorted(range(len(together)), key=lambda i: (i * 3 + 2) % len(together))
    shuffled = dict(
        zip(
            order,
            attend(order, padded=False).split([problem.sequences[i][0] for i in order]),
            strict=True,
        )
    )
    elsewhere = elsewhere.split([n for n, _ in problem.sequences])
    for i, expected in enumerate(together):
        padded = attend([i], padded=True)
        assert (padded[len(expected) :] == 0).all()
        for other in (
            attend([i], padded=False), padded[: len(expected)], shuffled[i], elsewhere[i],
        ):  # fmt: skip
            if is_exact(backend, problem.shape, device):
                assert torch.equal(other, expected)
            else:
                tolerance = max(1e-5, 4 * torch.finfo(dtypes[0]).eps)
                torch.testing.assert_close(other, expected, rtol=tolerance, atol=tolerance)


@BACKENDS
@pytest.mark.parametrize(
    "dtypes", [d for d in DTYPES if d[0] != torch.bfloat16 and d[1] != "int8-block"], ids=str
)
def test_long_contexts_keep_their_bits_in_any_company(
    backend: str, device: str, dtypes: tuple
) -> None:
    """However a step's work is shared out, a context is cut and merged in the same places."""
    case = dataclasses.replace(PLAIN, dtypes=dtypes, heads=(2, 1), head_dim=32)
    problem = Problem(case, device, sequences=LONG)
    layer = problem.fill_cache("reference", "nan")
    together = problem.attend(backend, layer)
    assert torch.equal(problem.attend(backend, layer), together)
    exact = problem.dense(layer, torch.float64)
    same_dtype = problem.dense(layer, problem.query_dtype)
    allowed = 2 * (same_dtype.double() - exact).abs().max() + unit(problem.query_dtype, exact)
    if not is_exact(backend, problem.shape, device) and problem.query_dtype == torch.float32:
        # What `cpu` promises: with an INT8 cache its error is three times PyTorch's here.
        allowed = torch.tensor(1e-5, device=device)
    assert (together.double() - exact).abs().max() <= allowed

    # Layers that share a preparation meet in the same memory; none may see what another left there.
    chosen = pk.select_backend(backend, problem.shape, device)
    prepared = chosen.prepare(problem.metadata(), problem.shape)
    for q in (problem.queries(), -problem.queries(), problem.queries()):
        first, second = (
            pk.paged_attention(
                q, layer.k, layer.v, metadata, scale=problem.scale, **layer.scales, backend=chosen
            )
            for metadata in (prepared, problem.metadata())
        )
        assert torch.equal(first, second)
    if backend == "triton":  # one program after the other, stale counts give the right answer late
        assert not prepared.work_list.arrivals.any()

    # Alone, in pairs and among many (who share the blocks they read): one program's, or cut fine.
    for company in ([2], [0, 3], [1, 0], [3, 2, 1, 0], [2, *[0] * 15]):
        query_lens = [LONG[i][0] for i in company]
        metadata = dataclasses.replace(
            pk.AttentionMetadata.from_host(
                query_lens, query_lens, [[i] for i in range(len(company))],
                block_size=16, num_blocks=problem.num_blocks, device=device,
            ),
            seq_lens=torch.tensor([LONG[i][1] for i in company], dtype=torch.int32, device=device),
            block_tables=problem.metadata().block_tables,
            rows=torch.tensor(company, dtype=torch.int32, device=device),
            bounds=pk.AttentionBounds(len(company), sum(query_lens), max(query_lens), 2100),
        )  # fmt: skip
        out = pk.paged_attention(
            torch.cat([problem.q[i] for i in company]), layer.k, layer.v, metadata,
            scale=problem.scale, **layer.scales, backend=backend,
        )  # fmt: skip
        starts = [0, 1, 2, 3]
        expected = torch.cat([together[starts[i] : starts[i] + LONG[i][0]] for i in company])
        if is_exact(backend, problem.shape, device):
            assert torch.equal(out, expected), company
        else:
            tolerance = max(1e-5, 4 * torch.finfo(dtypes[0]).eps)
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@BACKENDS
def test_a_padding_row_changes_no_other(backend: str, device: str) -> None:
    """Three decoding sequences padded to four by a row of one token and no keys (B9)."""
    tables, seq_lens = [[1], [2, 0], [3]], [5, 17, 9]
    layer = make_layer(6, 2, 16, 64, "float32", device=device, fill="nan")
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(sum(seq_lens), 2, 64, generator=generator).to(device)
    fill = pk.AttentionMetadata.from_host(
        seq_lens, seq_lens, tables, block_size=16, num_blocks=6, device=device
    )
    pk.store_kv(k, k, layer.k, layer.v, fill, backend=backend)
    metadata = pk.AttentionMetadata.from_host(
        [1, 1, 1], seq_lens, tables, block_size=16, num_blocks=6, device=device
    )
    q = torch.randn(4, 4, 64, generator=generator).to(device)
    alone = pk.paged_attention(q[:3], layer.k, layer.v, metadata, scale=0.125, backend=backend)
    padded = pad(metadata, num_seqs=1, num_tokens=1)
    padded.query_start_loc[4] = 4
    out = pk.paged_attention(
        q, layer.k, layer.v, padded, scale=0.125, backend=backend, out=torch.full_like(q, torch.nan)
    )
    assert torch.equal(out[:3], alone)
    assert (out[3] == 0).all()


@BACKENDS
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float16, "int8")][
        : 1
        if IS_INTERPRETED
        else None  # an interpreted card has one multiprocessor
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None] if IS_INTERPRETED else [None, 150])
@pytest.mark.parametrize("head_dim", [64] if IS_INTERPRETED else [64, 256])
def test_more_tiles_of_queries_than_a_card_has_multiprocessors(
    backend: str, device: str, head_dim: int, dtypes: tuple, window: int | None
) -> None:
    """Thread blocks that take one tile after another carry nothing over from the one before."""
    lengths = (
        [(70, 70), (20, 90)] if IS_INTERPRETED else [(700, 700), (1, 40), (500, 900), (3, 500)]
    )
    # A tile holds up to 192 rows, and 160 multiprocessors are as many as cards have by now.
    heads = (16, 16) if device == "cpu" else (32, 32)
    case = dataclasses.replace(PLAIN, dtypes=dtypes, heads=heads, head_dim=head_dim, window=window)
    problem = Problem(case, device, sequences=lengths)
    layer = problem.fill_cache("reference", "nan")
    got, exact = problem.attend(backend, layer), problem.dense(layer, torch.float64)
    same_dtype = problem.dense(layer, problem.query_dtype)
    allowed = 2 * (same_dtype.double() - exact).abs().max() + unit(problem.query_dtype, exact)
    assert (got.double() - exact).abs().max() <= allowed
    chosen = pk.select_backend(backend, problem.shape, device)
    prepared = chosen.prepare(problem.metadata(), problem.shape)
    for _ in range(2):
        assert torch.equal(problem.attend(backend, layer, prepared), got), "another launch differs"


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("longest", [1, 4])
def test_a_full_card_gives_each_sequence_what_it_gets_alone(
    backend: str, device: str, longest: int, dtype: torch.dtype
) -> None:
    """More sequences than run at once: whole ones and parts follow each other in one program."""
    count, step, heads = (3, 47, (4, 2)) if device == "cpu" else (64, 157, (32, 8))
    sequences = [(1 + i % longest, longest + (i + 1) * step % 1100) for i in range(count)]
    case = dataclasses.replace(PLAIN, dtypes=(dtype, str(dtype)[6:]), heads=heads)
    problem = Problem(case, device, sequences=sequences)
    layer = problem.fill_cache("reference", "nan")
    chosen = pk.select_backend(backend, problem.shape, device)
    prepared = chosen.prepare(problem.metadata(), problem.shape)
    together, exact = problem.attend(backend, layer, prepared), problem.dense(layer, torch.float64)
    same_dtype = problem.dense(layer, dtype)
    allowed = 2 * (same_dtype.double() - exact).abs().max() + unit(dtype, exact)
    assert (together.double() - exact).abs().max() <= allowed
    assert torch.equal(problem.attend(backend, layer, prepared), together), "another launch differs"

    for i in range(0, count, max(1, count // 8)):
        query_len, seq_len = sequences[i]
        metadata = pk.AttentionMetadata.from_host(
            [query_len], [seq_len], [problem.block_tables[i]],
            block_size=16, num_blocks=problem.num_blocks, device=device,
        )  # fmt: skip
        alone = pk.paged_attention(
            problem.q[i], layer.k, layer.v, metadata, scale=problem.scale, backend=backend
        )
        first = sum(n for n, _ in sequences[:i])
        if is_exact(backend, problem.shape, device):
            assert torch.equal(alone, together[first : first + query_len]), sequences[i]
        else:
            tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
            torch.testing.assert_close(
                alone, together[first : first + query_len], rtol=tolerance, atol=tolerance
            )


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


@BACKENDS
def test_one_preparation_serves_all_layers_and_windows(backend: str, device: str) -> None:
    """The prepared step gives the unprepared step's bits, whatever windows its layers have."""
    problem = Problem(PLAIN, device)
    layer = problem.fill_cache("reference", "nan")
    chosen = pk.select_backend(backend, problem.shape, device)
    prepared = chosen.prepare(problem.metadata(), problem.shape)
    for window in (None, 7, None, 30):
        first, second = (
            pk.paged_attention(
                problem.queries(), layer.k, layer.v, metadata, scale=problem.scale,
                window=window, backend=chosen,
            )
            for metadata in (prepared, problem.metadata())
        )  # fmt: skip
        assert torch.equal(first, second)


@BACKENDS
def test_buffers_may_stay_where_they_are(backend: str, device: str) -> None:
    """Contents written into the same tensors and prepared again are the new step."""
    problem = Problem(PLAIN, device)
    layer = problem.fill_cache("reference", "nan")
    chosen = pk.select_backend(backend, problem.shape, device)
    expected = problem.attend(backend, layer)
    metadata = problem.metadata()
    buffers = dataclasses.replace(
        metadata,
        query_start_loc=torch.zeros_like(metadata.query_start_loc),
        seq_lens=torch.zeros_like(metadata.seq_lens),
        rows=torch.zeros_like(metadata.rows),
        block_tables=torch.zeros_like(metadata.block_tables),
    )
    before = chosen.prepare(buffers, problem.shape)
    nothing = pk.paged_attention(
        problem.queries(), layer.k, layer.v, before, scale=problem.scale, backend=chosen
    )
    assert (nothing == 0).all()
    for name in ("query_start_loc", "seq_lens", "rows", "block_tables"):
        getattr(buffers, name).copy_(getattr(metadata, name))
    # Row order is the caller's: reverse the table's rows and point at them.
    buffers.block_tables.copy_(metadata.block_tables.flip(0))
    buffers.rows.copy_(metadata.rows.flip(0))
    out = pk.paged_attention(
        problem.queries(), layer.k, layer.v, chosen.prepare(buffers, problem.shape),
        scale=problem.scale, backend=chosen,
    )  # fmt: skip
    assert torch.equal(out, expected)


@BACKENDS
def test_a_step_of_nothing(backend: str, device: str) -> None:
    metadata = pk.AttentionMetadata.from_host(
        [], [], [], block_size=16, num_blocks=4, device=device
    )
    layer = make_layer(4, 1, 16, 64, "float32", device=device, fill="nan")
    empty = torch.empty(0, 1, 64, device=device)
    pk.store_kv(empty, empty, layer.k, layer.v, metadata, backend=backend)
    out = pk.paged_attention(empty, layer.k, layer.v, metadata, scale=1.0, backend=backend)
    assert out.shape == (0, 1, 64)
    assert layer.k.isnan().all()


ON_GPU = [(name, device) for name, device in backends_here() if device == "cuda"]
GPU_BACKENDS = pytest.mark.parametrize(
    "backend", [name for name, _ in ON_GPU if name != "reference"] or ["none"]
)
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU and a back end for it")


@pytest.mark.gpu
@NEEDS_GPU
@GPU_BACKENDS
@pytest.mark.parametrize("spec", SPECIALISATIONS, ids=str)
def test_many_steps_on_a_gpu(backend: str, spec: Specialisation) -> None:
    """Over 5,000 random steps in all, eager and by graph, with few compiled kernels.

    ``PAGETIDE_GPU_STEPS`` sets the steps of each specialisation, ``PAGETIDE_GPU_RECORD`` names a
    folder for a line of JSON each.
    """
    steps = int(os.environ.get("PAGETIDE_GPU_STEPS", "320"))
    chosen = pk.select_backend(backend, spec.shape, "cuda")
    compiled, started = num_compiled(), time.perf_counter()
    buffers = Buffers(spec, chosen, "cuda")
    rng, generator = random.Random(str(spec)), torch.Generator("cuda").manual_seed(0)
    for _ in range(steps):
        check_step(buffers, random_step(buffers, rng, generator))
    if folder := os.environ.get("PAGETIDE_GPU_RECORD"):
        record = {
            "backend": backend, "specialisation": str(spec), "steps": steps,
            "compiled": num_compiled() - compiled,
            "seconds": round(time.perf_counter() - started, 1),
        }  # fmt: skip
        name = f"{backend}-{SPECIALISATIONS.index(spec)}.json"
        Path(folder, name).write_text(json.dumps(record) + "\n", encoding="utf-8")


@pytest.mark.gpu
@NEEDS_GPU
@GPU_BACKENDS
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_a_cache_beyond_32_bits(backend: str, kv_dtype: str) -> None:
    """More than 2^31 elements, block ids beyond 65,536: the bits are those of a small cache."""
    num_blocks = 1_100_000  # of 2,048 elements
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    layers = {}
    ids = {"small": list(range(70)), "large": [num_blocks - 1 - 7919 * i for i in range(70)]}
    ids["large"][:4] = [65_535, 65_536, 1_048_575, 1_048_576]
    query_lens, seq_lens = [1, 30, 3, 1], [300, 60, 500, 1]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, 64, generator=generator).to("cuda", torch.float16)
        for n, heads in ((sum(query_lens), 6), (sum(seq_lens), 2), (sum(seq_lens), 2))
    )
    caches = {}
    for size, blocks in ids.items():
        spec = KVCacheSpec(1, 2, 64, 16, kv_dtype)
        caches[size] = KVCache(spec, num_blocks if size == "large" else 70, device="cuda")
        layer = caches[size].layer(0)
        left = iter(blocks)
        tables = [[next(left) for _ in range(-(-n // 16))] for n in seq_lens]
        host = {"block_size": 16, "num_blocks": num_blocks, "device": "cuda"}
        scales = {"k_scales": layer.k_scales, "v_scales": layer.v_scales}
        full = pk.AttentionMetadata.from_host(seq_lens, seq_lens, tables, **host)
        pk.store_kv(k, v, layer.k, layer.v, full, **scales, backend=backend)
        metadata = pk.AttentionMetadata.from_host(query_lens, seq_lens, tables, **host)
        layers[size] = pk.paged_attention(
            q, layer.k, layer.v, metadata, scale=0.125, **scales, backend=backend
        )
    assert caches["large"].layer(0).k.numel() > 2**31
    assert torch.equal(layers["large"], layers["small"])
    assert layers["large"].isfinite().all()
    assert (layers["large"] != 0).any(dim=-1).all()

    large = caches["large"]
    untouched = next(b for b in range(num_blocks - 1, 0, -1) if b not in ids["large"])
    pk.copy_blocks(
        large, [BlockCopy(ids["large"][0], untouched), BlockCopy(1_048_576, 5)], backend=backend
    )
    assert torch.equal(large.data[:, :, untouched], large.data[:, :, ids["large"][0]])
    assert torch.equal(large.data[:, :, 5], large.data[:, :, 1_048_576])
    assert large.data[:, :, 5].any()
