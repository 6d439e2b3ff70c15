"""Thousands of random steps over few compiled kernels: what only a GPU can prove.

A specialisation fixes all that a kernel is compiled for; its steps vary in lengths, tables, windows
and poison. Each step runs twice: eagerly on a clean cache, and on a poisoned one by replaying a
graph that was captured once, within bounds. The two must agree bit for bit, and with dense
attention.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from contract_harness import Layer, dense_attention, make_layer, poison, read_back
from torch import Tensor

import pagetide_kernels as pk

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NUM_SEQS = 8
MAX_QUERY_LEN = 40
MAX_SEQ_LEN = 700
NUM_TOKENS = NUM_SEQS * MAX_QUERY_LEN


@dataclass(frozen=True)
class Specialisation:
    """What is compiled for."""

    dtypes: tuple[torch.dtype, str]
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    has_window: bool = False
    has_soft_cap: bool = False
    layout: str = "kvcache"

    def __str__(self) -> str:
        query, kv = self.dtypes
        options = "-window" * self.has_window + "-cap" * self.has_soft_cap
        return (
            f"{str(query)[6:]}x{kv}-{self.heads[0]}/{self.heads[1]}x{self.head_dim}"
            f"-b{self.block_size}{options}-{self.layout}"
        )

    @property
    def shape(self) -> pk.AttentionShape:
        return pk.AttentionShape(*self.heads, self.head_dim, self.block_size, *self.dtypes)


SPECIALISATIONS = (
    Specialisation((F16, "float16"), (14, 2), 64, 16),
    Specialisation((F16, "float16"), (32, 8), 128, 16),
    Specialisation((F16, "float16"), (12, 12), 64, 32, layout="slots_first"),
    Specialisation((F16, "float16"), (28, 4), 128, 16, has_window=True),
    Specialisation((F16, "float16"), (8, 1), 256, 8, has_soft_cap=True),
    Specialisation((F16, "float16"), (9, 3), 80, 64, layout="heads_first"),
    Specialisation((BF16, "bfloat16"), (32, 8), 128, 32, has_window=True, has_soft_cap=True),
    Specialisation((BF16, "bfloat16"), (14, 2), 96, 16),
    Specialisation((BF16, "int8"), (9, 3), 64, 16),
    Specialisation((BF16, "int8-block"), (48, 2), 72, 8),
    Specialisation((F16, "int8"), (32, 8), 128, 16),
    Specialisation((F16, "int8-block"), (7, 1), 112, 64, has_window=True),
    Specialisation((F32, "float32"), (9, 3), 64, 16),
    Specialisation((F32, "float16"), (14, 2), 40, 8, has_soft_cap=True, layout="slots_first"),
    Specialisation((F32, "bfloat16"), (6, 2), 128, 32, has_window=True),
    Specialisation((F32, "int8"), (40, 2), 32, 16),
)


@dataclass(frozen=True)
class Step:
    """One step's host values and tokens."""

    query_lens: list[int]
    seq_lens: list[int]
    tables: list[list[int]]
    window: int | None
    poison: str
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def __str__(self) -> str:
        lengths = list(zip(self.query_lens, self.seq_lens, strict=True))
        return f"{lengths}, window {self.window}, poison {self.poison}, tables {self.tables}"

    def new_tokens(self, of: list[Tensor]) -> Tensor:
        return torch.cat(
            [x[s - n : s] for x, n, s in zip(of, self.query_lens, self.seq_lens, strict=True)]
        )


class Buffers:
    """Tensors at fixed addresses, with a graph over them that was captured once."""

    def __init__(self, spec: Specialisation, backend: pk.AttentionBackend, device: str) -> None:
        self.spec, self.backend, self.device = spec, backend, device
        width = -(-MAX_SEQ_LEN // spec.block_size)
        self.num_blocks = NUM_SEQS * width + 3
        heads, kv_heads = spec.heads
        int32 = {"dtype": torch.int32, "device": device}
        self.metadata = pk.AttentionMetadata(
            query_start_loc=torch.zeros(NUM_SEQS + 1, **int32),
            seq_lens=torch.zeros(NUM_SEQS, **int32),
            rows=torch.arange(NUM_SEQS, **int32),
            block_tables=torch.zeros(NUM_SEQS, width, **int32),
            slot_mapping=torch.zeros(NUM_TOKENS, dtype=torch.int64, device=device),
            block_size=spec.block_size,
            bounds=pk.AttentionBounds(NUM_SEQS, NUM_TOKENS, MAX_QUERY_LEN, MAX_SEQ_LEN),
        )
        size = {"dtype": spec.dtypes[0], "device": device}
        self.q = torch.zeros(NUM_TOKENS, heads, spec.head_dim, **size)
        self.k, self.v = (
            torch.zeros(NUM_TOKENS, kv_heads, spec.head_dim, **size) for _ in range(2)
        )
        self.out = torch.zeros_like(self.q)
        self.clean, self.poisoned = (self.make_layer() for _ in range(2))
        self.graphs: dict[int | None, torch.cuda.CUDAGraph] = {}

    def make_layer(self) -> Layer:
        spec = self.spec
        return make_layer(
            self.num_blocks, spec.heads[1], spec.block_size, spec.head_dim, spec.dtypes[1],
            device=self.device, layout=spec.layout,
        )  # fmt: skip

    def compute(self, window: int | None) -> None:
        """The step in the buffers: its work list, its tokens stored, its attention."""
        spec, layer = self.spec, self.poisoned
        metadata = self.backend.prepare(self.metadata, spec.shape)
        pk.store_kv(
            self.k, self.v, layer.k, layer.v, metadata, **layer.scales, backend=self.backend
        )
        pk.paged_attention(
            self.q, layer.k, layer.v, metadata, scale=spec.head_dim**-0.5, **layer.scales,
            window=window, soft_cap=5.0 if spec.has_soft_cap else None, backend=self.backend,
            out=self.out,
        )  # fmt: skip

    def replay(self, window: int | None) -> None:
        """The same through the graph; without a GPU, the same called once more."""
        if self.device == "cpu":
            self.compute(window)
            return
        if window not in self.graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            saved = [tensor.clone() for tensor in self.poisoned.memory]
            with torch.cuda.stream(stream):
                self.compute(window)
            torch.cuda.current_stream().wait_stream(stream)
            for tensor, old in zip(self.poisoned.memory, saved, strict=True):
                tensor.copy_(old)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.compute(window)
            self.graphs[window] = graph
        self.graphs[window].replay()


def random_step(buffers: Buffers, rng: random.Random, generator: torch.Generator) -> Step:
    """Any mix of decoding, drafting, prefilling, continuing and absent sequences."""
    spec = buffers.spec
    b = spec.block_size
    near = [1, 2, b - 1, b, b + 1, 3 * b + 1, 63, 64, 65, 127, 128, 129, 257, 400, 699, 700]
    kind = rng.choice(["decode", "decode", "mixed", "mixed", "drafts", "prefill"])
    query_lens, seq_lens = [], []
    for _ in range(rng.randint(1, NUM_SEQS)):
        seq_len = rng.choice([min(rng.choice(near), MAX_SEQ_LEN), rng.randint(1, MAX_SEQ_LEN)])
        query_len = {
            "decode": 1,
            "drafts": rng.randint(1, 5),
            "prefill": rng.choice([seq_len, rng.randint(1, MAX_QUERY_LEN)]),
            "mixed": rng.choice([1, 1, 0, rng.randint(1, MAX_QUERY_LEN)]),
        }[kind]
        query_lens.append(min(query_len, seq_len, MAX_QUERY_LEN))
        seq_lens.append(seq_len)
    free = rng.sample(range(buffers.num_blocks), buffers.num_blocks)
    tables = [[free.pop() for _ in range(-(-s // b))] for s in seq_lens]
    heads, kv_heads = spec.heads

    def tokens(count: int, num_heads: int) -> Tensor:
        x = torch.randn(count, num_heads, spec.head_dim, generator=generator, device=buffers.device)
        return x.to(spec.dtypes[0])

    return Step(
        query_lens, seq_lens, tables,
        window=rng.choice([1, 4, 50, 300]) if spec.has_window else None,
        poison=rng.choice(["nan", "inf", "-inf", "7f"]),
        q=tokens(sum(query_lens), heads) * 2,
        k=[tokens(s, kv_heads) for s in seq_lens],
        v=[tokens(s, kv_heads) for s in seq_lens],
    )  # fmt: skip


def check_step(buffers: Buffers, step: Step) -> None:
    """Eager on a clean cache, by graph on a poisoned one, and dense in float64: all agree."""
    spec, backend, device = buffers.spec, buffers.backend, buffers.device
    count, num_tokens = len(step.seq_lens), step.num_tokens
    host = {"block_size": spec.block_size, "num_blocks": buffers.num_blocks, "device": device}
    context = [s - n for n, s in zip(step.query_lens, step.seq_lens, strict=True)]
    before = pk.AttentionMetadata.from_host(context, context, step.tables, **host)
    now = pk.AttentionMetadata.from_host(step.query_lens, step.seq_lens, step.tables, **host)
    old_k, old_v = (
        torch.cat([x[:n] for x, n in zip(xs, context, strict=True)]) for xs in (step.k, step.v)
    )
    for layer, fill in ((buffers.clean, "zero"), (buffers.poisoned, step.poison)):
        for tensor in layer.memory:
            poison(tensor, fill)
        pk.store_kv(
            old_k, old_v, layer.k, layer.v, _padded(before, MAX_QUERY_LEN), **layer.scales,
            backend=backend,
        )  # fmt: skip

    # Eagerly: kernels for steps that only decode, or for any; with padding behind where there are
    # fewer tokens than the latter's bounds need.
    new_k, new_v = step.new_tokens(step.k), step.new_tokens(step.v)
    max_query_len = 1 if max(step.query_lens) <= 1 else MAX_QUERY_LEN
    padding = max(0, max_query_len - num_tokens)
    metadata = _padded(now, max_query_len, padding)
    layer = buffers.clean
    q, k, v = (
        torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])
        for x in (step.q, new_k, new_v)
    )
    pk.store_kv(k, v, layer.k, layer.v, metadata, **layer.scales, backend=backend)
    eager = pk.paged_attention(
        q, layer.k, layer.v, metadata, scale=spec.head_dim**-0.5, **layer.scales,
        window=step.window, soft_cap=5.0 if spec.has_soft_cap else None, backend=backend,
        out=torch.full_like(q, torch.nan),
    )  # fmt: skip
    assert (eager[num_tokens:] == 0).all(), f"padding is not zero: {step}"
    eager = eager[:num_tokens]

    # By the graph: the buffers get this step's content, with padding behind.
    fixed = buffers.metadata
    fixed.query_start_loc.fill_(num_tokens)
    fixed.query_start_loc[: count + 1].copy_(now.query_start_loc)
    fixed.seq_lens.zero_()
    fixed.seq_lens[:count].copy_(now.seq_lens)
    fixed.block_tables[:count, : now.block_tables.shape[1]].copy_(now.block_tables)
    fixed.slot_mapping.fill_(1 << 40)
    fixed.slot_mapping[:num_tokens].copy_(now.slot_mapping)
    for buffer, content in ((buffers.q, step.q), (buffers.k, new_k), (buffers.v, new_v)):
        buffer.fill_(torch.nan)
        buffer[:num_tokens].copy_(content)
    buffers.out.fill_(torch.nan)
    buffers.replay(step.window)
    assert torch.equal(buffers.out[:num_tokens], eager), f"graph and eager differ: {step}"
    assert (buffers.out[num_tokens:] == 0).all(), f"padding is not zero: {step}"

    exact, same_dtype = [], []
    starts = now.query_start_loc.tolist()
    for i, (table, seq_len) in enumerate(zip(step.tables, step.seq_lens, strict=True)):
        q = step.q[starts[i] : starts[i + 1]]
        k = read_back(layer.k, layer.k_scales, table, seq_len)
        v = read_back(layer.v, layer.v_scales, table, seq_len)
        for answers, dtype in ((exact, torch.float64), (same_dtype, spec.dtypes[0])):
            answers.append(
                dense_attention(
                    q.to(dtype), k.to(dtype), v.to(dtype), spec.head_dim**-0.5, step.window,
                    5.0 if spec.has_soft_cap else None,
                )
            )  # fmt: skip
    if not num_tokens:
        return
    truth = torch.cat(exact)
    error = (eager.double() - truth).abs().max().item()
    allowed = 2 * (torch.cat(same_dtype).double() - truth).abs().max().item()
    allowed += torch.finfo(spec.dtypes[0]).eps * max(1e-6, truth.abs().max().item())
    assert error <= allowed, f"error {error:.3g} above {allowed:.3g}: {step}"


def _padded(
    metadata: pk.AttentionMetadata, max_query_len: int, num_tokens: int = 0
) -> pk.AttentionMetadata:
    """Padding up to ``NUM_SEQS`` rows and ``num_tokens`` more tokens, and ``max_query_len`` for a
    bound: kernels are compiled for few values of these.
    """
    count = metadata.num_seqs
    longer = torch.zeros(NUM_SEQS - count, dtype=torch.int32, device=metadata.device)
    end = metadata.query_start_loc[-1:].expand(NUM_SEQS - count)
    nowhere = torch.full((num_tokens,), 1 << 40, dtype=torch.int64, device=metadata.device)
    slots = torch.cat([metadata.slot_mapping, nowhere])
    return pk.AttentionMetadata(
        query_start_loc=torch.cat([metadata.query_start_loc, end]),
        seq_lens=torch.cat([metadata.seq_lens, longer]),
        rows=torch.cat([metadata.rows, longer]),
        block_tables=metadata.block_tables,
        slot_mapping=slots,
        block_size=metadata.block_size,
        bounds=pk.AttentionBounds(
            NUM_SEQS, len(slots), min(max_query_len, len(slots)), metadata.bounds.max_seq_len
        ),
    )


def num_compiled() -> int:
    """Triton kernels compiled in this process so far."""
    from pagetide_kernels.triton import cache_ops, decode, prefill, work_list

    kernels = (
        decode.decode_kernel, prefill.prefill_kernel, work_list._work_list_kernel,
        cache_ops.store_kernel, cache_ops.store_block_scaled_kernel,
    )  # fmt: skip
    return sum(
        len(entry[0])
        for kernel in kernels
        for entry in getattr(kernel, "device_caches", {}).values()
    )
