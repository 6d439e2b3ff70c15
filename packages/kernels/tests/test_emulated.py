"""The compiled kernels' own source on the CPU: a thread a lane, in the form of each architecture.

``emulation`` stands in for the two headers that hold instructions. So what sm_75 does differently
runs here too, without a GPU, over caches whose unowned memory is NaN.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from contract_harness import TORCH_DTYPES, dense_attention
from torch import Tensor

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
KV_HEADS = 2
LEAF_SHIFT = 7  # a step of the widest kernel
MOST_LEAVES = 8
DTYPES = [
    ("float16", "float16"), ("float16", "int8"), ("float32", "float32"), ("float32", "int8"),
]  # fmt: skip
_CODES = {"float32": 0, "float16": 1, "int8": 3}  # of DType in params.h
_SHARED_MEMORY = "extern __shared__ __align__(128) unsigned char smem[];"


def _missing_reason() -> str | None:
    """Why the kernels cannot be compiled for this CPU."""
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        return "the kernels are compiled for the CPU on Linux only, by g++"
    said = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True)
    version = int(said.stdout.split(".")[0])
    return None if version >= 11 else f"g++ {version} has no barriers of C++20: 11 has"


_REASON = _missing_reason()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


class Problem(ctypes.Structure):
    """``Problem`` of ``emulation/kernels.cc``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "out", "q", "k", "v", "k_scales", "v_scales", "items", "block_tables", "states", "sums",
            "arrivals",
        )),
        *((name, ctypes.c_int32) for name in (
            "num_items", "num_runs", "num_seqs", "num_tokens", "num_kv_heads", "group_size",
            "head_dim", "block_size", "table_width", "window", "query_dtype", "kv_dtype",
            "state_rows",
        )),
        ("scale", ctypes.c_float), ("soft_cap", ctypes.c_float),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ctypes.CDLL]:
    """The kernels in the form of an architecture, given its number."""
    folder = tmp_path_factory.mktemp("emulation")
    for source in (*CSRC.glob("*.cuh"), *CSRC.glob("*.h"), *(TESTS / "emulation").iterdir()):
        text = source.read_text(encoding="utf-8")
        text = text.replace(_SHARED_MEMORY, "unsigned char* smem = emulation::shared;")
        (folder / source.name).write_text(text, encoding="utf-8")
    (folder / "decode_launch.cuh").write_text('#include "decode.cuh"\n', encoding="utf-8")

    @cache
    def load(architecture: int) -> ctypes.CDLL:
        path = folder / f"sm_{architecture}.so"
        subprocess.run(
            ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-fPIC", "-shared", "-pthread",
             "-w", f"-DEMULATED_ARCH={architecture}", str(folder / "kernels.cc"), "-o", str(path)],
            check=True,
        )  # fmt: skip
        found = ctypes.CDLL(str(path))
        found.emulate.restype = ctypes.c_bool
        found.emulate.argtypes = [ctypes.POINTER(Problem), ctypes.c_bool]
        return found

    return load


class Step:
    """Random sequences in a cache of NaN, and what dense attention makes of them."""

    def __init__(
        self, dtypes: tuple[str, str], lengths: list[tuple[int, int]], *, group: int, head_dim: int,
        block_size: int, window: int | None, soft_cap: float | None, seed: int,
    ) -> None:  # fmt: skip
        self.dtypes, self.lengths, self.group = dtypes, lengths, group
        self.head_dim, self.block_size = head_dim, block_size
        self.window, self.soft_cap = window, soft_cap
        torch.manual_seed(seed)
        counts = [-(-seq_len // block_size) for _, seq_len in lengths]
        num_blocks = sum(counts) + 2
        free = iter(random.Random(seed).sample(range(num_blocks), sum(counts)))
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = torch.tensor([next(free) for _ in range(count)])
        query_dtype, self.kv_dtype = (TORCH_DTYPES[name] for name in dtypes)
        num_tokens = sum(query_len for query_len, _ in lengths)
        self.q = (torch.randn(num_tokens, KV_HEADS * group, head_dim) * 2).to(query_dtype)
        size = (num_blocks, KV_HEADS, block_size, head_dim)
        self.k, self.v = (torch.zeros(size, dtype=self.kv_dtype) for _ in "kv")
        self.k_scales, self.v_scales = (torch.full(size[:3], torch.nan) for _ in "kv")
        for data in (self.k, self.v):
            data.fill_(127 if self.kv_dtype == torch.int8 else torch.nan)

        exact, same = [], []
        first = 0
        for row, (query_len, seq_len) in enumerate(lengths):
            keys = self.fill(self.k, self.k_scales, row, seq_len)
            values = self.fill(self.v, self.v_scales, row, seq_len)
            q = self.q[first : first + query_len]
            first += query_len
            for answers, dtype in ((exact, torch.float64), (same, query_dtype)):
                answers.append(
                    dense_attention(
                        q.to(dtype), keys.to(dtype), values.to(dtype), head_dim**-0.5, window,
                        soft_cap,
                    )
                )  # fmt: skip
        self.exact, self.same = torch.cat(exact), torch.cat(same)

    def fill(self, data: Tensor, scales: Tensor, row: int, seq_len: int) -> Tensor:
        """Random keys of a sequence, as they are read back: [seq_len, KV_HEADS, head_dim]."""
        kept = []
        for position in range(seq_len):
            block = int(self.tables[row, position // self.block_size])
            slot = (block, slice(None), position % self.block_size)
            if self.kv_dtype == torch.int8:
                scales[slot] = torch.rand(KV_HEADS) * 0.03 + 0.005
                data[slot] = torch.randint(-127, 128, (KV_HEADS, self.head_dim)).to(torch.int8)
                kept.append(data[slot] * scales[slot][:, None])
            else:
                data[slot] = torch.randn(KV_HEADS, self.head_dim).to(self.kv_dtype)
                kept.append(data[slot].float())
        return torch.stack(kept)

    def run(
        self, emulated: ctypes.CDLL, items: list[list[int]], num_blocks: int, rows: int
    ) -> Tensor:
        """Attention by the items.

        Args:
            emulated: the kernels.
            items: words of ``DecodeItem`` each, or of ``WorkItem`` for the prefill kernel.
            num_blocks: thread blocks of a KV head.
            rows: of a decode tile; 0: the prefill kernel.
        """
        words = torch.tensor(items, dtype=torch.int32)
        out = torch.full_like(self.q, torch.nan)
        size = (len(self.lengths) * MOST_LEAVES, KV_HEADS, max(rows, 1))
        states = torch.full((*size, 64 if self.head_dim <= 64 else 128), torch.nan)
        sums = torch.full((*size, 2), torch.nan)
        arrivals = torch.zeros(len(self.lengths), KV_HEADS, dtype=torch.int32)
        tensors = (
            out, self.q, self.k, self.v, self.k_scales, self.v_scales, words, self.tables, states,
            sums, arrivals,
        )  # fmt: skip
        problem = Problem(
            *(tensor.data_ptr() for tensor in tensors), num_blocks, num_blocks, len(self.lengths),
            len(self.q), KV_HEADS, self.group, self.head_dim, self.block_size,
            self.tables.shape[1], self.window or 0, *(_CODES[name] for name in self.dtypes), rows,
            self.head_dim**-0.5, self.soft_cap or 0.0,
        )  # fmt: skip
        assert emulated.emulate(ctypes.byref(problem), rows == 0), "there is no such kernel"
        assert not arrivals.any(), "arrivals are not counted from zero again"
        return out

    def check(self, got: Tensor) -> None:
        """Within the contract's bound."""
        allowed = 2 * (self.same.double() - self.exact).abs().max()
        allowed += torch.finfo(got.dtype).eps * self.exact.abs().max()
        assert (got.double() - self.exact).abs().max() <= allowed

    def item(self, row: int, **fields: int) -> list[int]:
        """The words of a sequence's ``WorkItem``, but for the fields that are given."""
        query_len, seq_len = self.lengths[row]
        words = {
            "sequence": row, "table_row": row, "first_row": 0, "num_rows": query_len * self.group,
            "first_leaf": 0, "num_leaves": self.num_leaves(row), "num_items": 1,
            "first_state": row * MOST_LEAVES, "seq_len": seq_len, "query_len": query_len,
            "first_token": sum(n for n, _ in self.lengths[:row]), "leaf_shift": LEAF_SHIFT,
            "next": -1, "num_step_tokens": len(self.q),
        }  # fmt: skip
        assert not set(fields) - set(words)
        return [*(words | fields).values(), 0, 0]

    def decode_item(self, row: int, **fields: int) -> list[int]:
        """The same and the blocks of its first keys: a ``DecodeItem``."""
        first_block = (fields.get("first_leaf", 0) << LEAF_SHIFT) // self.block_size
        blocks = self.tables[row, first_block : first_block + 16].tolist()
        return [*self.item(row, **fields), *blocks, *[0] * (16 - len(blocks))]

    def num_leaves(self, row: int) -> int:
        return -(-self.lengths[row][1] >> LEAF_SHIFT)


@pytest.mark.parametrize("architecture", [75, 80, 90])
@pytest.mark.parametrize("head_dim", [64, 112, 128])
@pytest.mark.parametrize("dtypes", DTYPES, ids="x".join)
def test_decode(
    library: Callable[[int], ctypes.CDLL], architecture: int, head_dim: int, dtypes: tuple[str, str]
) -> None:
    """Right, and the same bits however a step's leaves are dealt to thread blocks."""
    emulated = library(architecture)
    rng = random.Random(f"{dtypes}{head_dim}")
    for seed in range(2):
        group = rng.choice([1, 4, 7, 8])
        near = [1, 2, 3, 31, 33, 97, 127, 128, 129, 200, 257, 300]
        lengths = [(1, rng.choice(near)) for _ in range(3)]
        if group < 8 and dtypes[0] == "float16":
            lengths[1] = (2, max(2, lengths[1][1]))
        step = Step(
            dtypes, lengths, group=group, head_dim=head_dim, seed=seed,
            block_size=rng.choice([8, 16, 32]), window=rng.choice([None, None, 1, 50]),
            soft_cap=rng.choice([None, None, 3.0]),
        )  # fmt: skip
        rows = 16 if lengths[1][0] * group > 8 else 8
        sequences = range(len(lengths))
        # Behind a step's items are those that a thread block goes on to.
        behind = [step.decode_item(0, sequence=-1)] * (len(lengths) + 1)

        whole = [step.decode_item(row) for row in sequences]
        got = step.run(emulated, whole + behind, len(whole), rows)
        step.check(got)

        split = [
            step.decode_item(row, first_leaf=leaf, num_leaves=1, num_items=step.num_leaves(row))
            for row in sequences
            for leaf in range(step.num_leaves(row))
        ]
        rng.shuffle(split)
        assert torch.equal(step.run(emulated, split + behind, len(split), rows), got)

        walked = [step.decode_item(row, next=row + 1) for row in sequences[:-1]]
        walked.append(step.decode_item(sequences[-1]))
        assert torch.equal(step.run(emulated, walked + behind, 1, rows), got)


@pytest.mark.parametrize("architecture", [75, 80])
@pytest.mark.parametrize("head_dim", [64, 112, 128])
@pytest.mark.parametrize("dtypes", DTYPES[:2], ids="x".join)
def test_prefill(
    library: Callable[[int], ctypes.CDLL], architecture: int, head_dim: int, dtypes: tuple[str, str]
) -> None:
    """Right, and the same bits whichever rows share a tile."""
    emulated = library(architecture)
    rng = random.Random(f"{dtypes}{head_dim}")
    for seed in range(2):
        group = rng.choice([1, 4, 7])
        lengths = [(n, n + rng.choice([0, 1, 40, 150])) for n in rng.sample([3, 17, 33, 40], 2)]
        step = Step(
            dtypes, lengths, group=group, head_dim=head_dim, seed=seed,
            block_size=rng.choice([8, 16, 32]), window=rng.choice([None, 1, 20]),
            soft_cap=rng.choice([None, 3.0]),
        )  # fmt: skip

        def run(tile: int, step: Step = step) -> Tensor:
            items = [
                step.item(i, first_row=row, num_rows=min(tile, n * step.group - row))
                for i, (n, _) in enumerate(step.lengths)
                for row in range(0, n * step.group, tile)
            ]
            return step.run(emulated, items, len(items), 0)

        got = run(128)
        step.check(got)
        assert torch.equal(run(40), got)
