"""Times the ladder's rungs on a GPU: decode attention of Qwen2-0.5B's shape, float16.

    python run.py build/ladder/libladder-75-90.so --context 512 --sequences 1 2 4 8

For every number of sequences a line a rung: microseconds, tokens/s, the speed-up over one sequence,
and the part of the card's copy bandwidth that reading K and V once would need. Launches stand back
to back in a CUDA graph on one warm cache (`--cold`: on caches rotated beyond L2). Beside them
PyTorch's attention as Hugging Face calls it, on contiguous keys, and the package's back ends. Every
result is checked against float32 PyTorch first.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from pagetide_kernels import AttentionMetadata, AttentionShape, paged_attention, select_backend
from pagetide_kernels.errors import KernelError

HEADS, KV_HEADS, DIM, BLOCK, SPLIT = 14, 2, 64, 16, 128
SCALE = DIM**-0.5
RUNGS = [
    "rung_1_naive", "rung_2_shared_tiles", "rung_3_online_softmax", "rung_4_async_ring",
    "rung_5_split_kv", "rung_6_tensor_cores",
]  # fmt: skip
POINTERS = ["out", "q", "k", "v", "tables", "seq_lens", "states", "arrivals"]
INTEGERS = ["num_seqs", "num_heads", "num_kv_heads", "table_stride", "max_seq_len"]


class Args(ctypes.Structure):
    """``ladder::Args``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int) for name in INTEGERS),
        ("scale", ctypes.c_float),
    ]


class Problem:
    """One step's tensors, and each way to compute it."""

    def __init__(self, num_seqs: int, context: int) -> None:
        num_blocks = -(-context // BLOCK)
        total = num_seqs * num_blocks
        options = {"device": "cuda", "dtype": torch.float16}
        self.q = torch.randn(num_seqs, HEADS, DIM, **options)
        self.k = torch.randn(total, KV_HEADS, BLOCK, DIM, **options)
        self.v = torch.randn(total, KV_HEADS, BLOCK, DIM, **options)
        self.out = torch.zeros_like(self.q)
        self.tables = torch.randperm(total, device="cuda", dtype=torch.int32).view(num_seqs, -1)
        self.seq_lens = torch.full((num_seqs,), context, device="cuda", dtype=torch.int32)
        splits = -(-context // SPLIT)
        self.states = torch.zeros(num_seqs * splits * KV_HEADS * 8 * (DIM + 2), device="cuda")
        self.arrivals = torch.zeros(num_seqs * HEADS, dtype=torch.int32, device="cuda")
        self.args = Args(
            *(getattr(self, name).data_ptr() for name in POINTERS),
            num_seqs, HEADS, KV_HEADS, num_blocks, context, SCALE,
        )  # fmt: skip
        self.dense = [
            cache[self.tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous()
            for cache in (self.k, self.v)
        ]
        self.metadata = AttentionMetadata.from_host(
            [1] * num_seqs, [context] * num_seqs, self.tables.tolist(),
            block_size=BLOCK, num_blocks=total, device="cuda",
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        """float32 [sequences, heads, 64]."""
        q, (k, v) = self.q.float().unsqueeze(2), (each.float() for each in self.dense)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=SCALE, enable_gqa=True
        ).squeeze(2)

    def ways(self, library: ctypes.CDLL) -> dict[str, Callable[[], None]]:
        """Every way by name; each fills ``out``."""

        def rung(name: str) -> Callable[[], None]:
            function = getattr(library, name)

            def launch() -> None:
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                if status := function(ctypes.byref(self.args), stream):
                    raise RuntimeError(f"{name}: CUDA error {status}")

            return launch

        def torch_attention() -> None:
            k, v = self.dense
            result = torch.nn.functional.scaled_dot_product_attention(
                self.q.unsqueeze(2), k, v, scale=SCALE, enable_gqa=True
            )
            self.out.copy_(result.squeeze(2))

        def package(name: str) -> Callable[[], None]:
            shape = AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, torch.float16, "float16")
            backend = select_backend(name, shape, "cuda")
            metadata = backend.prepare(self.metadata, shape)
            return lambda: paged_attention(
                self.q, self.k, self.v, metadata, scale=SCALE, backend=backend, out=self.out
            )

        ways = {name: rung(name) for name in RUNGS}
        ways["torch"] = torch_attention
        for name in ("cuda", "triton"):
            try:
                ways[name] = package(name)
            except KernelError as error:
                print(f"# {name}: {error}")
        return ways


def microseconds(calls: list[Callable[[], None]], launches: int = 200) -> float:
    """The median time of a call in a replayed graph of at least that many."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = -(-launches // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes a microsecond that a copy of 512 MB reads and writes."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds([lambda: target.copy_(source)], 4)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    library = ctypes.CDLL(str(arguments.library))
    bandwidth = copy_bandwidth()
    print(f"# {torch.cuda.get_device_name()}, copy {bandwidth / 1e6:.2f} TB/s")
    print(f"{'':22} {'sequences':>9} {'us':>8} {'tokens/s':>11} {'scaling':>8} {'% of limit':>10}")
    first: dict[str, float] = {}
    for num_seqs in arguments.sequences:
        cache_bytes = 2 * num_seqs * arguments.context * KV_HEADS * DIM * 2
        copies = max(2, -(-(192 << 20) // cache_bytes)) if arguments.cold else 1
        problems = [Problem(num_seqs, arguments.context) for _ in range(min(copies, 200))]
        ways = [problem.ways(library) for problem in problems]
        for name, way in ways[0].items():
            problems[0].out.fill_(float("nan"))
            way()
            error = (problems[0].out.float() - problems[0].exact()).abs().max().item()
            if not error < 2e-3:
                raise SystemExit(f"{name} is wrong by {error}")
            time = microseconds([each[name] for each in ways])
            rate = num_seqs / time * 1e6
            first.setdefault(name, rate)
            limit = 100 * cache_bytes / bandwidth / time
            print(
                f"{name:22} {num_seqs:9} {time:8.2f} {rate:11,.0f} {rate / first[name]:7.2f}x "
                f"{limit:10.1f}"
            )


if __name__ == "__main__":
    main()
