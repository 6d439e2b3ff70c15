"""The compiled library: finding it, loading it, and its functions as PyTorch operators.

The library needs no PyTorch to build and none of its headers: ``apache-tvm-ffi`` passes tensors in
and errors out. Operators are registered with ``define`` and ``impl``, which cost 2 us a call.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["load", "missing_reason"]

_PATH = Path(__file__).parent.parent / "_lib" / "libpagetide_kernels.so"
_NAMESPACE = "pagetide"

# name -> schema; each returns nothing and writes what it marks.
_SCHEMAS = {
    "work_list": (
        "(Tensor(a!) decode_items, Tensor(b!) prefill_items, Tensor(c!) arrivals, "
        "Tensor query_start_loc, Tensor seq_lens, Tensor rows, Tensor block_tables, "
        "int block_size, int group_size, int num_runs, int cluster_size, int decode_rows, "
        "int prefill_rows, bool has_prefill_kernel, int min_leaf_keys, int long_leaf_keys, "
        "int few_leaves, int max_leaves)"
    ),
    "paged_attention": (
        "(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor? k_scales, Tensor? v_scales, "
        "Tensor decode_items, Tensor prefill_items, Tensor query_start_loc, Tensor block_tables, "
        "Tensor(b!) states, Tensor(c!) sums, Tensor(d!) arrivals, float scale, float soft_cap, "
        "int window, int path, int decode_head_dim, int prefill_head_dim, int prefill_rows, "
        "int num_runs, int row_tiles, int cluster_size, int cluster_leaves)"
    ),
    "store_kv": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scales, "
        "Tensor(d!)? v_scales, Tensor slot_mapping, Tensor query_start_loc, bool is_block_scaled)"
    ),
    "copy_blocks": "(Tensor source, Tensor(a!) destination, Tensor pairs)",
}


@cache
def missing_reason() -> str | None:
    """Why the library cannot be loaded here, with the remedy; None if it can."""
    if not _PATH.exists():
        return (
            "this installation of pagetide-kernels has no compiled CUDA library (it was built "
            "without a CUDA or C++ compiler, or runs from a checkout): install g++ and CUDA 13's "
            "nvcc and build the wheel with PAGETIDE_BUILD_CUDA=1, or use the 'triton' back end"
        )
    try:
        _module()
    except (ImportError, OSError, RuntimeError) as error:
        return f"the compiled CUDA library cannot be loaded: {error}; use the 'triton' back end"
    return None


@cache
def _module() -> Any:
    try:
        import tvm_ffi
    except ImportError as error:
        raise ImportError(f"apache-tvm-ffi cannot be imported ({error}): install it") from error
    return tvm_ffi.load_module(str(_PATH))


@cache
def compiled_architecture(device_index: int) -> int | str:
    """The architecture (75, 80, ...) of the code that runs on a GPU, or why none does."""
    try:
        return int(_module().architecture(device_index))
    except RuntimeError as error:
        return str(error)


@cache
def load() -> Any:
    """The operators, registered on first use: ``torch.ops.pagetide``."""
    module = _module()
    untyped: Any = torch.library
    library = untyped.Library(_NAMESPACE, "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(f"{name}{schema} -> ()")
        keys = ("CUDA", "CPU") if name == "copy_blocks" else ("CUDA",)  # pools may be on the host
        for key in keys:
            library.impl(name, getattr(module, name), key)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", lambda *_: None, lib=library)
    _KEPT.append(library)
    return torch.ops.pagetide


_KEPT: list[torch.library.Library] = []  # a library's operators vanish with it
