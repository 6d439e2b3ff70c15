"""Times the ``cpu`` back end a layer and a step: ``python benchmarks/cpu_attention.py``.

Six layers take turns, so that in larger cases nothing stays in the caches from call to call. It
prints the least and the median, in microseconds: on a busy machine only the least means something.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from pagetide_kernels import (
    AttentionMetadata,
    AttentionShape,
    paged_attention,
    select_backend,
    store_kv,
)

NUM_LAYERS = 6
BLOCK_SIZE = 16
CASES = [  # query heads, KV heads, head_dim, (query_len, seq_len) of each sequence
    (9, 3, 64, [(1, 100)]),
    (9, 3, 64, [(1, 100)] * 8),
    (9, 3, 64, [(1, n) for n in range(60, 380, 10)]),
    (9, 3, 64, [(1, 1000)] * 8),
    (9, 3, 64, [(1, 4000)] + [(1, 100)] * 7),
    (12, 12, 64, [(1, 1000)] * 8),
    (9, 3, 64, [(40, 40)] * 8),
    (9, 3, 64, [(512, 512)]),
    (9, 3, 64, [(512, 2048)]),
]


def timed(call: Callable[[], object], seconds: float = 0.5) -> str:
    """Least and median of the calls made in ``seconds``."""
    for _ in range(3):
        call()
    times: list[float] = []
    while sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return f"{min(times) * 1e6:8.0f} {statistics.median(times) * 1e6:8.0f}"


@torch.inference_mode()
def main() -> None:
    """Print a line a case."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32; min median us")
    print(f"{'heads':>8} {'seqs':>5} {'queries':>8} {'keys':>6}  {'attention':>17} {'store_kv':>17} {'prepare':>17}")  # fmt: skip  # noqa: E501
    for num_heads, num_kv_heads, head_dim, sequences in CASES:
        counts = [-(-n // BLOCK_SIZE) for _, n in sequences]
        num_blocks = sum(counts)
        free = torch.randperm(num_blocks).tolist()
        tables = [[free.pop() for _ in range(n)] for n in counts]
        query_lens, seq_lens = zip(*sequences, strict=True)
        shape = AttentionShape(
            num_heads, num_kv_heads, head_dim, BLOCK_SIZE, torch.float32, "float32"
        )
        backend = select_backend("cpu", shape, "cpu")
        metadata = AttentionMetadata.from_host(
            query_lens, seq_lens, tables, block_size=BLOCK_SIZE, num_blocks=num_blocks
        )
        prepared = backend.prepare(metadata, shape)
        caches = torch.randn(NUM_LAYERS, 2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        q = torch.randn(sum(query_lens), num_heads, head_dim)
        k = torch.randn(sum(query_lens), num_kv_heads, head_dim)
        layer = 0

        def attend() -> None:
            nonlocal layer
            layer = (layer + 1) % NUM_LAYERS
            paged_attention(q, *caches[layer], prepared, scale=0.125, backend=backend)  # noqa: B023

        def store() -> None:
            store_kv(k, k, *caches[0], prepared, backend=backend)  # noqa: B023

        def prepare() -> None:
            fresh = backend.prepare(metadata, shape)  # noqa: B023
            paged_attention(q, *caches[0], fresh, scale=0.125, backend=backend)  # noqa: B023

        print(
            f"{num_heads:>5}/{num_kv_heads:<2} {len(sequences):>5} {max(query_lens):>8} "
            f"{max(seq_lens):>6}  {timed(attend)} {timed(store)} {timed(prepare)}"
        )
    print("prepare includes one layer's attention, which makes the plan of its window")


if __name__ == "__main__":
    main()
