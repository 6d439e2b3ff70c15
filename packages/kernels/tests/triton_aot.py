"""Compiles the Triton kernels ahead of time, for cards that are not here; a line of JSON each.

    python tests/triton_aot.py [80 86 ...]

It runs in a process of its own: `test_triton_compiles.py` reads what it prints.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagetide_kernels.metadata import AttentionShape
from pagetide_kernels.triton import work_list
from pagetide_kernels.triton.cache_ops import (
    copy_blocks_kernel,
    store_block_scaled_kernel,
    store_kernel,
)
from pagetide_kernels.triton.decode import decode_kernel
from pagetide_kernels.triton.prefill import prefill_kernel
from pagetide_kernels.triton.tuning import shared_memory_limit, tuning_for

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
TENSOR_CORES = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma")
DTYPES = {
    torch.float32: ("fp32", tl.float32),
    torch.float16: ("fp16", tl.float16),
    torch.bfloat16: ("bf16", tl.bfloat16),
}
KV_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "i8"}


@dataclass(frozen=True)
class Job:
    """One kernel for one shape and card."""

    kernel: str
    architecture: int
    heads: tuple[int, int]
    head_dim: int
    dtypes: tuple[torch.dtype, str]
    block_size: int = 16
    has_options: bool = False  # window, soft cap, unequal and odd strides

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(*self.heads, self.head_dim, self.block_size, *self.dtypes)


def jobs(architectures: tuple[int, ...]) -> list[Job]:
    """Every kernel for every card; the shapes that need most memory where there is least."""
    half = (torch.float16, "float16")
    made = []
    for card in architectures:
        made += [
            Job(kernel, card, heads, head_dim, half)
            for kernel in ("decode", "prefill")
            for heads, head_dim in (((14, 2), 64), ((32, 8), 128))
        ]
        made += [Job("work_list", card, (14, 2), 64, half), Job("copy", card, (14, 2), 64, half)]
        made.append(Job("store", card, (14, 2), 64, (torch.bfloat16, "int8")))
        made.append(Job("store_block_scaled", card, (14, 2), 64, (torch.float16, "int8")))
        if card == 89:
            made += [
                job
                for kernel in ("decode", "prefill")
                for job in (
                    Job(kernel, card, (8, 1), 256, (torch.bfloat16, "bfloat16")),
                    Job(kernel, card, (64, 1), 128, (torch.float16, "int8")),
                    Job(kernel, card, (8, 1), 80, (torch.bfloat16, "int8")),
                    Job(kernel, card, (9, 3), 64, (torch.float16, "int8"), has_options=True),
                    Job(kernel, card, (9, 3), 64, (torch.float32, "float32")),
                    Job(kernel, card, (9, 3), 40, half, block_size=64, has_options=True),
                )
            ]
    return made


def compile_job(job: Job) -> dict[str, Any]:
    """What the compiler made of it."""
    shape = job.shape
    card = (job.architecture // 10, job.architecture % 10)
    tuning = tuning_for(shape, card)
    query, dtype = DTYPES[shape.query_dtype]
    kv = KV_DTYPES[shape.kv_dtype]
    is_paired = shape.is_quantized and not job.has_options
    cache = "*i16" if is_paired and job.kernel in ("decode", "prefill") else f"*{kv}"
    scales = "*fp32" if shape.is_quantized else f"*{kv}"
    attention = {
        "GROUP_SIZE": shape.group_size, "HEAD_DIM": shape.head_dim, "DIM": tuning.dim,
        "BLOCK_SIZE": shape.block_size, "DTYPE": dtype, "IS_QUANTIZED": shape.is_quantized,
        "IS_PAIRED": is_paired,
        "SAME_STRIDES": not job.has_options, "HAS_WINDOW": job.has_options,
        "HAS_SOFT_CAP": job.has_options,
    }  # fmt: skip
    heads = triton.next_power_of_2(shape.num_kv_heads)
    dim = triton.next_power_of_2(shape.head_dim)
    store = {"HEAD_DIM": shape.head_dim, "DIM": dim, "BLOCK_SIZE": shape.block_size}
    kernel, constants, num_warps = {
        "decode": (
            decode_kernel,
            {
                **attention, "NUM_KV_HEADS": shape.num_kv_heads, "TILE": tuning.tile,
                "ROWS": tuning.decode_rows, "STATE_ROWS": shape.group_size,
                "MERGE_ROWS": triton.next_power_of_2(shape.group_size),
                "MERGED_AT_ONCE": tuning.merged_at_once(triton.next_power_of_2(shape.group_size)),
                "GROUP": tuning.group, "STAGES": tuning.decode_stages, "OVERLAPS": tuning.overlaps,
            },
            tuning.decode_warps,
        ),
        "prefill": (
            prefill_kernel,
            {
                **attention, "TILE": tuning.prefill_tile, "ROWS": tuning.prefill_rows,
                "STAGES": tuning.prefill_stages,
            },
            tuning.prefill_warps,
        ),
        "work_list": (
            work_list._work_list_kernel,
            {"SEQS": 256, "CHUNK": 64},
            8,
        ),
        "store": (
            store_kernel,
            {
                **store, "NUM_HEADS": shape.num_kv_heads, "HEADS": heads,
                "IS_QUANTIZED": shape.is_quantized,
            },
            4,
        ),
        "store_block_scaled": (store_block_scaled_kernel, store, 1),
        "copy": (copy_blocks_kernel, {"CHUNK": 1024}, 4),
    }[job.kernel]  # fmt: skip
    pointers = {
        "out": f"*{query}", "q": f"*{query}", "k": f"*{query}", "v": f"*{query}",
        "k_cache": cache, "v_cache": cache, "k_scales": scales, "v_scales": scales,
        "states": "*fp32", "sums": "*fp32", "slot_mapping": "*i64", "pairs": "*i64",
        **dict.fromkeys(
            ("items", "query_start_loc", "seq_lens", "block_tables", "rows", "arrivals",
             "decode_items", "prefill_items", "source", "destination"), "*i32",
        ),
    }  # fmt: skip
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "fp32" if name in ("scale", "soft_cap") else "i32")
        if name in pointers or (name.endswith("_stride") and name != "table_stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", job.architecture, 32),
        options={
            "num_warps": num_warps,
            "maxnreg": tuning.decode_registers if job.kernel == "decode" else None,
        },
    )
    return {
        "kernel": job.kernel,
        "architecture": job.architecture,
        "dtype": query,
        "head_dim": job.head_dim,
        "shared_memory": compiled.metadata.shared,
        "limit": shared_memory_limit(card),
        "has_tensor_cores": bool(TENSOR_CORES.search(compiled.asm["ptx"])),
        "has_machine_code": len(compiled.asm["cubin"]) > 0,
    }


def main() -> None:
    wanted = tuple(map(int, sys.argv[1:])) or ARCHITECTURES
    with ProcessPoolExecutor(2) as pool:
        for result in pool.map(compile_job, jobs(wanted)):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
