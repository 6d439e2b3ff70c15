"""The attention contract: what else a step holds changes no sequence (exactness level 1)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract_axes import DTYPES, IS_INTERPRETED
from contract_common import BACKENDS, PLAIN, is_exact, unit
from contract_harness import Problem, make_layer, pad

import pagetide_kernels as pk

# Beyond the kernels' tiles and splits: several leaves, of one tile and of two, whole and cut.
LONG = [(1, 700), (1, 130), (1, 2100), (2, 400)]


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
