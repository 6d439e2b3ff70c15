"""Builds a paged problem from a case, runs a back end on it, and states the answer itself."""

from __future__ import annotations

import dataclasses
import os
import random
import zlib
from dataclasses import dataclass

import torch
from contract_axes import IS_INTERPRETED, Case
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pagetide_kernels as pk
from pagetide_kvcache import KVCacheSpec
from pagetide_kvcache.storage import KVCache

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int8-block": torch.int8,
}


def backends_here() -> list[tuple[str, str]]:
    """(back end, device) of all that work on this machine, or of those PAGETIDE_BACKENDS names."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    wanted = os.environ.get("PAGETIDE_BACKENDS")
    return [
        (name, device)
        for device in devices
        for name, status in pk.available_backends(device).items()
        if status.is_available and (wanted is None or name in wanted.split(","))
    ]


def context_writer(backend: str) -> str:
    """Who stores a step's context: under the interpreter the reference, which is far quicker."""
    return "reference" if IS_INTERPRETED else backend


def num_contract_cases() -> int | None:
    """PAGETIDE_CONTRACT_CASES, if set."""
    value = os.environ.get("PAGETIDE_CONTRACT_CASES")
    return None if value is None else int(value)


@dataclass
class Layer:
    """One layer's cache."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    memory: tuple[Tensor, ...] = ()
    """All that the views above are views of, padding included."""

    @property
    def scales(self) -> dict[str, Tensor | None]:
        return {"k_scales": self.k_scales, "v_scales": self.v_scales}


def make_layer(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    kv_dtype: str,
    *,
    device: str = "cpu",
    layout: str = "kvcache",
    fill: str = "zero",
) -> Layer:
    """A layer whose every byte, padding included, holds ``fill``."""
    if layout == "kvcache":
        spec = KVCacheSpec(2, num_kv_heads, head_dim, block_size, kv_dtype)
        cache = KVCache(spec, num_blocks, device=device)
        layer = cache.layer(1)
        tensors = [cache.data] if cache.scales is None else [cache.data, cache.scales]
        made = Layer(layer.k, layer.v, layer.k_scales, layer.v_scales)
    else:
        order = {"slots_first": (0, 2, 1), "heads_first": (1, 0, 2)}[layout]
        sizes = (num_blocks, num_kv_heads, block_size)
        stored = [sizes[i] for i in order]
        data = torch.zeros(2, *stored, head_dim + 5, dtype=TORCH_DTYPES[kv_dtype], device=device)
        tensors = [data]
        inverse = [order.index(i) for i in range(3)]
        k, v = data[..., :head_dim].permute(0, *(i + 1 for i in inverse), 4).unbind(0)
        made = Layer(k, v)
        if kv_dtype == "int8":
            scales = torch.zeros(2, *stored, device=device)
            tensors.append(scales)
            made.k_scales, made.v_scales = scales.permute(0, *(i + 1 for i in inverse)).unbind(0)
        elif kv_dtype == "int8-block":
            scales = torch.zeros(2, num_kv_heads, num_blocks, device=device)
            tensors.append(scales)
            expanded = scales.transpose(1, 2).unsqueeze(-1).expand(2, *sizes)
            made.k_scales, made.v_scales = expanded.unbind(0)
    for tensor in tensors:
        poison(tensor, fill)
    return dataclasses.replace(made, memory=tuple(tensors))


def poison(tensor: Tensor, fill: str) -> None:
    """Fill memory with what nobody may read."""
    if fill == "zero":
        tensor.zero_()
    elif fill == "7f" or not tensor.is_floating_point():
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(float(fill))


class Problem:
    """Sequences with their tokens and block tables, by a case."""

    def __init__(
        self, case: Case, device: str, sequences: list[tuple[int, int]] | None = None
    ) -> None:
        self.case, self.device = case, device
        seed = zlib.crc32(str(case).encode())
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        self.query_dtype, self.kv_dtype = case.dtypes
        self.num_heads, self.num_kv_heads = case.heads
        self.sequences = case.sequences if sequences is None else sequences
        self.shape = pk.AttentionShape(
            *case.heads, case.head_dim, case.block_size, self.query_dtype, self.kv_dtype
        )
        needed = [-(-seq_len // case.block_size) for _, seq_len in self.sequences]
        self.num_blocks = sum(needed) + 3
        free = rng.sample(range(self.num_blocks), self.num_blocks)
        self.block_tables = [[free.pop() for _ in range(n)] for n in needed]

        def tokens(count: int, heads: int) -> Tensor:
            x = torch.randn(count, heads, case.head_dim, generator=generator)
            return x.to(self.query_dtype).to(device)

        self.q = [tokens(query_len, self.num_heads) * 2 for query_len, _ in self.sequences]
        self.k = [tokens(seq_len, self.num_kv_heads) for _, seq_len in self.sequences]
        self.v = [tokens(seq_len, self.num_kv_heads) for _, seq_len in self.sequences]
        self.scale = case.head_dim**-0.5
        # Two earlier steps wrote the context; this is where the first of them stopped.
        self.cuts = [rng.randint(0, s - n) for n, s in self.sequences]

    def step(self, starts: list[int], stops: list[int]) -> pk.AttentionMetadata:
        return pk.AttentionMetadata.from_host(
            [b - a for a, b in zip(starts, stops, strict=True)],
            stops,
            self.block_tables,
            block_size=self.case.block_size,
            num_blocks=self.num_blocks,
            device=self.device,
        )

    def metadata(self) -> pk.AttentionMetadata:
        """This step; under ``padded``, with two sequences and three tokens of padding behind."""
        metadata = self.step([s - n for n, s in self.sequences], [s for _, s in self.sequences])
        return (
            pad(metadata, num_seqs=2, num_tokens=3) if self.case.lengths == "padded" else metadata
        )

    def queries(self) -> Tensor:
        return self._with_padding(torch.cat(self.q))

    def fill_cache(self, backend: str, fill: str) -> Layer:
        """A cache of ``fill`` to which the back end stored every token, in three steps.

        Under the interpreter it stores this step's tokens, and ``reference`` the two before.
        """
        case = self.case
        layer = make_layer(
            self.num_blocks, self.num_kv_heads, case.block_size, case.head_dim, self.kv_dtype,
            device=self.device, layout=case.layout, fill=fill,
        )  # fmt: skip
        starts = [0] * len(self.sequences)
        for stops in (self.cuts, [s - n for n, s in self.sequences], None):
            ends = [s for _, s in self.sequences] if stops is None else stops
            metadata = self.metadata() if stops is None else self.step(starts, stops)
            k, v = (
                torch.cat([x[a:b] for x, a, b in zip(xs, starts, ends, strict=True)])
                for xs in (self.k, self.v)
            )
            if stops is None:
                k, v = self._with_padding(k), self._with_padding(v)
            writer = backend if stops is None else context_writer(backend)
            pk.store_kv(k, v, layer.k, layer.v, metadata, **layer.scales, backend=writer)
            starts = ends
        return layer

    def attend(
        self, backend: str, layer: Layer, prepared: pk.AttentionMetadata | None = None
    ) -> Tensor:
        """The back end's answer, written over NaN; to this step unless another is prepared."""
        q, metadata = self.queries(), prepared or self.metadata()
        return pk.paged_attention(
            q, layer.k, layer.v, metadata, scale=self.scale, **layer.scales,
            window=self.case.window, soft_cap=self.case.soft_cap, backend=backend,
            out=torch.full_like(q, torch.nan),
        )  # fmt: skip

    def dense(self, layer: Layer, dtype: torch.dtype) -> Tensor:
        """Dense attention in ``dtype`` over what the cache holds, by PyTorch."""
        answers = []
        for q, table, (query_len, seq_len) in zip(
            self.q, self.block_tables, self.sequences, strict=True
        ):
            k = read_back(layer.k, layer.k_scales, table, seq_len).to(dtype)
            v = read_back(layer.v, layer.v_scales, table, seq_len).to(dtype)
            answers.append(
                dense_attention(q.to(dtype), k, v, self.scale, self.case.window, self.case.soft_cap)
            )
            assert len(answers[-1]) == query_len
        answer = torch.cat(answers)
        padding = len(self.queries()) - len(answer)
        return torch.cat([answer, answer.new_zeros(padding, *answer.shape[1:])])

    def _with_padding(self, x: Tensor) -> Tensor:
        if self.case.lengths != "padded":
            return x
        return torch.cat([x, torch.full_like(x[:1], torch.nan).expand(3, -1, -1)])


def pad(metadata: pk.AttentionMetadata, *, num_seqs: int, num_tokens: int) -> pk.AttentionMetadata:
    """The same step with padding behind: empty sequences, and tokens whose slots are nonsense."""

    def longer(x: Tensor, count: int, value: int) -> Tensor:
        return torch.cat([x, torch.full((count,), value, dtype=x.dtype, device=x.device)])

    end = int(metadata.query_start_loc[-1])
    return dataclasses.replace(
        metadata,
        query_start_loc=longer(metadata.query_start_loc, num_seqs, end),
        seq_lens=longer(metadata.seq_lens, num_seqs, 0),
        rows=longer(metadata.rows, num_seqs, 0),
        slot_mapping=longer(metadata.slot_mapping, num_tokens, 1 << 40),
        work_list=None,
    )


def read_back(cache: Tensor, scales: Tensor | None, table: list[int], seq_len: int) -> Tensor:
    """Float64 [seq_len, num_kv_heads, head_dim], a sequence's keys or values, slot by slot."""
    block_size = cache.shape[2]
    positions = torch.arange(seq_len, device=cache.device)
    blocks = torch.tensor(table, dtype=torch.int64, device=cache.device)[positions // block_size]
    x = cache[blocks, :, positions % block_size].double()
    return x if scales is None else x * scales[blocks, :, positions % block_size, None].double()


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """PyTorch's attention of [query_len, heads, head_dim] to [seq_len, kv_heads, head_dim].

    ``PAGETIDE_DENSE_DEVICE`` names where, for tools that other libraries' kernels do not bear.
    """
    query_len, seq_len = len(q), len(k)
    if query_len == 0:
        return q
    device = q.device
    q, k, v = (x.to(os.environ.get("PAGETIDE_DENSE_DEVICE", device)) for x in (q, k, v))
    group_size = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group_size, 0), v.repeat_interleave(group_size, 0)
    distance = (
        torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
        - torch.arange(seq_len, device=q.device)[None, :]
    )
    is_visible = (distance >= 0) & (distance < (window or seq_len + 1))
    if soft_cap is None:
        out = scaled_dot_product_attention(q[None], k[None], v[None], is_visible, scale=scale)[0]
    else:
        scores = soft_cap * torch.tanh(q @ k.transpose(1, 2) * scale / soft_cap)
        out = scores.masked_fill(~is_visible, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).to(device)
