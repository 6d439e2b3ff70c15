"""Times our attention kernels beside the peers' on one NVIDIA GPU, in one run.

    python benchmarks/attention.py [--quick] [--only WORD] [--out FOLDER] [--backends triton,cuda]

Every kernel runs as replays of a CUDA graph over up to 16 caches in turn, float16, random content,
the same for all; the median counts. What is done once a step, not once a layer (our work list,
FlashInfer's plan), is not in the time; ours has a figure of its own. Each answer is checked against
float32 in the same run. Decode is judged by the share of the card's measured copy bandwidth,
prefill by the share of its measured matmul rate. Writes CSV, JSON and, with matplotlib, a plot.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_peers import BLOCK_SIZE, PEERS, Call, Case, Problem
from torch import Tensor

import pagetide_kernels as pk

L2_BYTES = 64 << 20
CASES = [
    Case("qwen2-0.5b decode", 14, 2, 64, 512, 1),
    Case("qwen2-0.5b decode", 14, 2, 64, 512, 4),
    Case("qwen2-0.5b decode", 14, 2, 64, 512, 8),
    Case("qwen2-0.5b decode", 14, 2, 64, 512, 64),
    Case("qwen2-0.5b decode", 14, 2, 64, 2048, 256, is_ragged=True),
    Case("gpt2 decode", 12, 12, 64, 1024, 32),
    Case("gpt2 decode", 12, 12, 64, 1024, 256, is_ragged=True),
    Case("llama-8b decode", 32, 8, 128, 4096, 1),
    Case("llama-8b decode", 32, 8, 128, 4096, 16),
    Case("llama-8b decode", 32, 8, 128, 4096, 64, is_ragged=True),
    Case("llama-8b decode", 32, 8, 128, 32768, 1),
    Case("qwen2-7b decode", 28, 4, 128, 8192, 32),
    Case("smollm2 decode", 9, 3, 64, 1024, 64),
    Case("qwen2-0.5b prefill", 14, 2, 64, 2048, 8, 2048),
    Case("llama-8b prefill", 32, 8, 128, 2048, 4, 2048),
    Case("llama-8b prefill", 32, 8, 128, 8192, 1, 8192),
    Case("llama-8b chunk", 32, 8, 128, 8192, 4, 512),
]
QUICK = (0, 4, 5, 8, 13)  # a small, a ragged, a ratio of 1, a long one, and a prefill


def timed(calls: list[Call], repeats: int = 20) -> float:
    """Median microseconds of a call; the calls take turns."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(20 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    return _median(graph.replay, repeats) * 1e3 / (rounds * len(calls))


def _median(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds between two events around the call."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure_ceilings() -> dict[str, float]:
    """This card's copy bandwidth (TB/s, read and write counted) and float16 matmul TFLOP/s."""
    source, target = torch.empty(2, 4 << 30, dtype=torch.uint8, device="cuda")
    copy_ms = _median(lambda: target.copy_(source), 12)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.float16)
    matmul_ms = _median(lambda: a @ b, 12)
    return {
        "copy_tb_s": 2 * source.numel() / copy_ms / 1e9,
        "matmul_tflop_s": 2 * 8192**3 / matmul_ms / 1e9,
    }


def make_problems(case: Case) -> list[Problem]:
    """As many caches as it takes to exceed L2 three times, at most 16."""
    blocks = math.ceil(case.context / BLOCK_SIZE)
    size = 2 * case.batch * blocks * BLOCK_SIZE * case.num_kv_heads * case.head_dim * 2
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
    if case.is_ragged:
        lens = torch.randint(
            case.context // 8, case.context + 1, (case.batch,), dtype=torch.int32, device="cuda"
        )
        lens[0] = case.context
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.query_len
    half = {"dtype": torch.float16, "device": "cuda"}
    problems = []
    for _ in range(max(1, min(16, math.ceil(3 * L2_BYTES / size)))):
        cache = (case.batch * blocks, case.num_kv_heads, BLOCK_SIZE, case.head_dim)
        problems.append(
            Problem(
                q=torch.randn(case.batch * case.query_len, case.num_heads, case.head_dim, **half),
                k=torch.randn(cache, **half),
                v=torch.randn(cache, **half),
                table=torch.randperm(case.batch * blocks, device="cuda")
                .int()
                .view(case.batch, blocks),
                lens=lens,
                starts=starts,
            )
        )
    return problems


def exact(case: Case, problem: Problem, k: Tensor, v: Tensor) -> Tensor:
    """float32 [tokens of the first one or two sequences, num_heads, head_dim], by dense products.

    Args:
        case: sizes.
        problem: queries, tables and lengths.
        k: float32 or float16 [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim].
        v: the same.
    """
    answers = []
    group = case.num_heads // case.num_kv_heads
    for i in range(min(case.batch, 1 if case.query_len > 2048 else 2)):
        length = int(problem.lens[i])
        keys, values = (
            x[problem.table[i].long()].transpose(0, 1).flatten(1, 2)[:, :length].float()
            for x in (k, v)
        )
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        q = problem.q[i * case.query_len : (i + 1) * case.query_len].float().transpose(0, 1)
        positions = torch.arange(length - case.query_len, length, device="cuda")
        for first in range(0, case.query_len, 1024):
            rows = slice(first, first + 1024)
            scores = q[:, rows] @ keys.transpose(1, 2) * case.scale
            is_hidden = torch.arange(length, device="cuda")[None] > positions[rows, None]
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            answers.append((weights @ values).transpose(0, 1))
    return torch.cat(answers)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 cache and float32 scales [num_blocks, num_kv_heads, BLOCK_SIZE] of a float16 cache."""
    scales = x.abs().amax(-1).float() / 127
    return (x / scales.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scales


def ours(
    name: str, case: Case, problems: list[Problem], kv_dtype: str
) -> tuple[list[Call], Call, Tensor]:
    """One call a problem, one that prepares a step, and the float32 answer."""
    shape = pk.AttentionShape(
        case.num_heads, case.num_kv_heads, case.head_dim, BLOCK_SIZE, torch.float16, kv_dtype
    )
    backend = pk.select_backend(name, shape, "cuda")
    calls: list[Call] = []
    for problem in problems:
        k, v = problem.k, problem.v
        scales: dict[str, Tensor | None] = {"k_scales": None, "v_scales": None}
        if kv_dtype == "int8":
            k, scales["k_scales"] = quantized(k)
            v, scales["v_scales"] = quantized(v)
        num_tokens = case.batch * case.query_len
        unprepared = pk.AttentionMetadata(
            query_start_loc=problem.starts,
            seq_lens=problem.lens,
            rows=torch.arange(case.batch, dtype=torch.int32, device="cuda"),
            block_tables=problem.table,
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device="cuda"),
            block_size=BLOCK_SIZE,
            bounds=pk.AttentionBounds(case.batch, num_tokens, case.query_len, case.context),
        )
        metadata = backend.prepare(unprepared, shape)
        out = torch.empty_like(problem.q)

        def call(
            problem: Problem = problem, k: Tensor = k, v: Tensor = v, scales: Any = scales,
            metadata: pk.AttentionMetadata = metadata, out: Tensor = out,
        ) -> Tensor:  # fmt: skip
            return pk.paged_attention(
                problem.q, k, v, metadata, scale=case.scale, **scales, backend=backend, out=out
            )

        calls.append(call)
        if problem is problems[0]:
            step = unprepared
            dense = [
                x if s is None else x.float() * s.unsqueeze(-1)
                for x, s in ((k, scales["k_scales"]), (v, scales["v_scales"]))
            ]
            answer = exact(case, problem, *dense)
            del dense

    def prepare() -> Tensor:
        backend.prepare(step, shape)
        return out

    return calls, prepare, answer


def run_case(
    case: Case, backends: list[str], ceilings: dict[str, float]
) -> list[dict[str, object]]:
    """A row for each kernel that can be called here; what cannot says why."""
    problems = make_problems(case)
    truth = exact(case, problems[0], problems[0].k, problems[0].v)
    keys = float(problems[0].lens.sum())
    values = keys * case.num_kv_heads * case.head_dim * 2
    visible = case.query_len * keys - case.batch * case.query_len * (case.query_len - 1) / 2
    flops = 4 * case.num_heads * case.head_dim * visible
    rows: list[dict[str, object]] = []

    def add(kernel: str, is_peer: bool, size: int, calls: list[Call], answer: Tensor) -> None:
        got = calls[0]()[: len(answer)].float()
        error = float((got - answer).norm() / answer.norm())
        us = timed(calls)
        tb_s, tflop_s = values * size / us / 1e6, flops / us / 1e6
        of = (
            tb_s / ceilings["copy_tb_s"] if case.is_decode
            else tflop_s / ceilings["matmul_tflop_s"]
        )  # fmt: skip
        rows.append(
            {
                "case": str(case), "kernel": kernel, "is_peer": is_peer, "us": round(us, 2),
                "tb_s": round(tb_s, 3), "tflop_s": round(tflop_s, 1),
                "percent_of_ceiling": round(100 * of, 1), "error": float(f"{error:.2e}"),
                "is_correct": error < (2e-2 if "int8" in kernel else 2e-3),
                "kv_mb": round(values * size / 1e6, 1),
            }
        )  # fmt: skip

    for kernel, make in PEERS.items():
        try:
            add(kernel, True, 2, make(case, problems), truth)
        except Exception as error:
            print(f"  {kernel}: {type(error).__name__}: {str(error)[:160]}", flush=True)
        torch.cuda.empty_cache()
    for name in backends:
        for kv_dtype, size in (("float16", 2), ("int8", 1)):
            kernel = name if kv_dtype == "float16" else f"{name} int8"
            try:
                calls, prepare, answer = ours(name, case, problems, kv_dtype)
                add(kernel, False, size, calls, answer)
                if kv_dtype == "float16":
                    rows[-1]["prepare_us"] = round(timed([prepare]), 2)
            except Exception as error:
                print(f"  {kernel}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.empty_cache()
    _compare(rows)
    return rows


def _compare(rows: list[dict[str, Any]]) -> None:
    """Adds the ratio to the best correct peer, and of INT8 to our float16 (above 1: faster)."""
    best = min((r["us"] for r in rows if r["is_peer"] and r["is_correct"]), default=None)
    own = {r["kernel"]: r["us"] for r in rows}
    for row in rows:
        row["times_best_peer"] = None if best is None else round(best / row["us"], 3)
        name, _, kind = row["kernel"].partition(" ")
        if kind == "int8" and name in own:
            row["times_own_float16"] = round(own[name] / row["us"], 3)


def plot(rows: list[dict[str, Any]], path: Path) -> bool:
    """Speed relative to the best peer, a group of bars a case."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(row["case"] for row in rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    figure, axes = plt.subplots(figsize=(10, 0.6 * len(cases) + 2))
    height = 0.8 / len(kernels)
    for i, kernel in enumerate(kernels):
        points = [
            (cases.index(row["case"]) + i * height, row["times_best_peer"] or 0)
            for row in rows if row["kernel"] == kernel
        ]  # fmt: skip
        axes.barh(*zip(*points, strict=True), height=height, label=kernel)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([i + 0.4 for i in range(len(cases))], cases, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to the best peer of the same run")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return True


def main() -> None:
    """Print a line a kernel and case; write attention.csv, .json and .png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five cases")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--backends", default="triton,cuda", help="ours, by name")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no NVIDIA GPU: this benchmark needs one")
    torch.manual_seed(0)
    statuses = pk.available_backends("cuda")
    backends = []
    for name in options.backends.split(","):
        if name in statuses and statuses[name].is_available:
            backends.append(name)
        else:
            print(f"{name}: {statuses[name].reason if name in statuses else 'no such back end'}")
    ceilings = measure_ceilings()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}: copy {ceilings['copy_tb_s']:.2f} TB/s, "
          f"float16 matmul {ceilings['matmul_tflop_s']:.0f} TFLOP/s")  # fmt: skip
    cases = [CASES[i] for i in QUICK] if options.quick else CASES
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if options.only not in str(case):
            continue
        print(case, flush=True)
        with torch.inference_mode():
            rows += run_case(case, backends, ceilings)
        for row in rows:
            if row["case"] == str(case):
                rate = f"{row['tb_s']:6.2f} TB/s" if case.is_decode else f"{row['tflop_s']:6.0f} TF"
                print(
                    f"  {row['kernel']:16s} {row['us']:9.1f} us {rate} "
                    f"{row['percent_of_ceiling']:5.1f}%  best peer / this "
                    f"{row['times_best_peer'] or math.nan:5.2f}  error {row['error']:.1e}"
                    + ("" if row["is_correct"] else "  WRONG")
                    + (f"  of float16 {row['times_own_float16']:.2f}x"
                       if "times_own_float16" in row else "")
                    + (f"  prepare {row['prepare_us']:.1f} us" if "prepare_us" in row else ""),
                    flush=True,
                )  # fmt: skip
        torch.cuda.empty_cache()
        _write(rows, ceilings, device, options.out)  # after each case: a run may be cut short
    if not plot(rows, options.out / "attention.png"):
        print("no plot: matplotlib is not installed")


def _write(
    rows: list[dict[str, Any]], ceilings: dict[str, float], device: str, folder: Path
) -> None:
    record = {"device": device, "torch": torch.__version__, "ceilings": ceilings, "rows": rows}
    (folder / "attention.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "attention.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
