"""The attention kernels that ours are timed beside, where they can be imported.

Each function takes a `Case` and its problems and returns one callable a problem; each callable
writes and returns float16 [T, num_heads, head_dim]. Peers' caches are [num_blocks, block_size,
num_kv_heads, head_dim]; the content is ours, permuted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_SIZE = 16
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    batch: int
    query_len: int = 1
    is_ragged: bool = False
    is_warm: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def is_decode(self) -> bool:
        return self.query_len == 1

    def __str__(self) -> str:
        ragged = "ragged " if self.is_ragged else ""
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"
        queries = "" if self.is_decode else f" q{self.query_len}"
        warm = " warm" if self.is_warm else ""
        return f"{self.name} {heads} {ragged}{self.context} x {self.batch}{queries}{warm}"


@dataclass(frozen=True)
class Problem:
    """One cache with its step.

    Attributes:
        q: float16 [T, num_heads, head_dim].
        k, v: float16 [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim], contiguous.
        table: int32 [batch, blocks].
        lens: int32 [batch].
        starts: int32 [batch + 1].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lens: Tensor
    starts: Tensor

    def contiguous(self, cache: Tensor) -> Tensor:
        """[batch, num_kv_heads, context, head_dim]: every sequence's keys or values in a row."""
        gathered = cache[self.table.long()]  # [batch, blocks, heads, slots, head_dim]
        return gathered.transpose(1, 2).flatten(2, 3).contiguous()


def theirs(cache: Tensor) -> Tensor:
    """The same content in the peers' order."""
    return cache.transpose(1, 2).contiguous()


def torch_sdpa(case: Case, problems: list[Problem]) -> list[Call]:
    """As Hugging Face calls it: contiguous K and V, a mask where lengths or offsets need one."""
    # The fastest that PyTorch has on Hopper, which it is found to do without once vLLM is imported.
    torch.backends.cuda.enable_cudnn_sdp(True)

    def make(problem: Problem) -> Call:
        k, v = (problem.contiguous(x)[:, :, : case.context] for x in (problem.k, problem.v))
        shape = (case.batch, case.query_len, case.num_heads, case.head_dim)
        q = problem.q.view(shape).transpose(1, 2)
        keys = torch.arange(case.context, device=q.device)
        mask = None
        if case.is_ragged:
            mask = (keys[None, :] < problem.lens[:, None])[:, None, None, :]
        elif 1 < case.query_len < case.context:
            own = torch.arange(case.context - case.query_len, case.context, device=q.device)
            mask = (keys[None, :] <= own[:, None])[None, None]
        is_causal = mask is None and case.query_len > 1
        group = case.num_heads // case.num_kv_heads
        out = torch.empty_like(problem.q)

        def call() -> Tensor:
            if mask is None:
                answer = scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal, scale=case.scale, enable_gqa=group > 1
                )
            else:  # transformers repeats the KV heads where it passes a mask
                answer = scaled_dot_product_attention(
                    q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask,
                    scale=case.scale,
                )  # fmt: skip
            out.view(shape).copy_(answer.transpose(1, 2))
            return out

        return call

    return [make(problem) for problem in problems]


def vllm_fa3(case: Case, problems: list[Problem]) -> list[Call]:
    """FlashAttention 3, as vLLM ships it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def make(problem: Problem) -> Call:
        k, v, out = theirs(problem.k), theirs(problem.v), torch.empty_like(problem.q)

        def call() -> Tensor:
            flash_attn_varlen_func(
                problem.q, k, v, max_seqlen_q=case.query_len, cu_seqlens_q=problem.starts,
                max_seqlen_k=case.context, seqused_k=problem.lens, softmax_scale=case.scale,
                causal=True, block_table=problem.table, out=out, fa_version=3,
            )  # fmt: skip
            return out

        return call

    return [make(problem) for problem in problems]


def vllm_triton(case: Case, problems: list[Problem]) -> list[Call]:
    """vLLM's unified Triton kernel."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    device = problems[0].q.device
    threshold, segments = max(1, 128 // case.num_kv_heads), 16
    dim = 1 << (case.head_dim - 1).bit_length()
    outs = torch.empty(threshold, case.num_heads, segments, dim, device=device)
    maxima = torch.empty(threshold, case.num_heads, segments, device=device)
    sums = torch.empty_like(maxima)

    def make(problem: Problem) -> Call:
        k, v, out = theirs(problem.k), theirs(problem.v), torch.empty_like(problem.q)

        def call() -> Tensor:
            unified_attention(
                q=problem.q, k=k, v=v, out=out, cu_seqlens_q=problem.starts,
                max_seqlen_q=case.query_len, seqused_k=problem.lens, max_seqlen_k=case.context,
                softmax_scale=case.scale, causal=True, window_size=(-1, -1),
                block_table=problem.table, softcap=0, q_descale=None, k_descale=None,
                v_descale=None, seq_threshold_3D=threshold, num_par_softmax_segments=segments,
                softmax_segm_output=outs, softmax_segm_max=maxima, softmax_segm_expsum=sums,
            )  # fmt: skip
            return out

        return call

    return [make(problem) for problem in problems]


def vllm_cuda_paged(case: Case, problems: list[Problem]) -> list[Call]:
    """vLLM's CUDA paged attention, v1 or v2 by its own rule; decode only."""
    if not case.is_decode:
        raise ValueError("decode only")
    import vllm._custom_ops as ops

    device = problems[0].q.device
    one = torch.ones((), device=device)
    parts = math.ceil(case.context / 512)
    packed = 8  # float16 elements in 16 bytes, the innermost dimension of its key cache

    def make(problem: Problem) -> Call:
        blocks = problem.k.shape[0]
        # [N, heads, slots, D] -> [N, heads, D / 8, slots, 8], and values [N, heads, D, slots]
        sizes = (blocks, case.num_kv_heads, BLOCK_SIZE, case.head_dim // packed, packed)
        k = problem.k.view(sizes).permute(0, 1, 3, 2, 4).contiguous()
        v = problem.v.transpose(2, 3).contiguous()
        out = torch.empty_like(problem.q)
        sums = torch.empty(case.batch, case.num_heads, parts, device=device)
        maxima = torch.empty_like(sums)
        partial = torch.empty(
            case.batch, case.num_heads, parts, case.head_dim, device=device, dtype=torch.float16
        )
        common = (
            problem.q, k, v, case.num_kv_heads, case.scale, problem.table, problem.lens,
            BLOCK_SIZE, case.context, None, "auto", one, one,
        )  # fmt: skip

        def call() -> Tensor:
            many = case.batch * case.num_heads > 512 and case.context <= 8192
            if parts == 1 or many:
                ops.paged_attention_v1(out, *common)
            else:
                ops.paged_attention_v2(out, sums, maxima, partial, *common)
            return out

        return call

    return [make(problem) for problem in problems]


def flashinfer(case: Case, problems: list[Problem]) -> list[Call]:
    """FlashInfer; its planning, on the host once a step, is not timed."""
    import flashinfer as fi

    device = problems[0].q.device
    half = torch.float16
    sizes = (case.num_heads, case.num_kv_heads, case.head_dim, BLOCK_SIZE)

    def make(problem: Problem) -> Call:
        cache, out = (theirs(problem.k), theirs(problem.v)), torch.empty_like(problem.q)
        counts = (problem.lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        zero = torch.zeros(1, device=device, dtype=torch.int32)
        ends = torch.cat([zero, counts.cumsum(0).int()])
        blocks = torch.cat([problem.table[b, : int(counts[b])] for b in range(case.batch)])
        last = ((problem.lens - 1) % BLOCK_SIZE + 1).int()
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        if case.is_decode:
            wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True,
                use_tensor_cores=case.num_heads // case.num_kv_heads >= 4,
                paged_kv_indptr_buffer=ends.clone(), paged_kv_indices_buffer=blocks.clone(),
                paged_kv_last_page_len_buffer=last.clone(),
            )  # fmt: skip
            wrapper.plan(ends, blocks, last, *sizes, q_data_type=half, kv_data_type=half)
        else:
            wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
            wrapper.plan(
                problem.starts, ends, blocks, last, *sizes, causal=True, q_data_type=half,
                kv_data_type=half,
            )  # fmt: skip

        def call() -> Tensor:
            wrapper.run(problem.q, cache, out=out)
            return out

        return call

    return [make(problem) for problem in problems]


def compile_flashinfer(num_heads: int, num_kv_heads: int, head_dim: int, query_len: int) -> None:
    """Has FlashInfer compile and keep what it needs for such heads, on a step of one sequence."""
    half = {"dtype": torch.float16, "device": "cuda"}
    case = Case("", num_heads, num_kv_heads, head_dim, 32, 1, query_len)
    cache = torch.randn(2, 2, num_kv_heads, BLOCK_SIZE, head_dim, **half)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    problem = Problem(
        q=torch.randn(query_len, num_heads, head_dim, **half), k=cache[0], v=cache[1],
        table=torch.tensor([[0, 1]], **int32), lens=torch.tensor([32], **int32),
        starts=torch.tensor([0, query_len], **int32),
    )  # fmt: skip
    flashinfer(case, [problem])[0]()
    torch.cuda.synchronize()


PEERS: dict[str, Callable[[Case, list[Problem]], list[Call]]] = {
    "torch-sdpa": torch_sdpa,
    "vllm-fa3": vllm_fa3,
    "vllm-triton": vllm_triton,
    "vllm-cuda-paged": vllm_cuda_paged,
    "flashinfer": flashinfer,
}

if __name__ == "__main__":
    compile_flashinfer(*map(int, sys.argv[1:]))
