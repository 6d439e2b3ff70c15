"""Times our attention kernels beside the peers' on one NVIDIA GPU, in one run.

    python benchmarks/attention.py [--quick] [--only WORD] [--out FOLDER] [--backends triton,cuda]
        [--seconds 280] [--resume]

Every kernel runs as replays of a CUDA graph over up to 16 caches in turn, float16, random content,
the same for all; the median counts. Warm rows have one cache, which stays in L2. What is done once
a step, not once a layer (our work list, FlashInfer's plan), is not in the time; ours has a figure
of its own. Each answer is checked against float32 in the same run. Decode is judged by the share of
the card's measured copy bandwidth, prefill by the share of its measured matmul rate.

A kernel that fails is a row with its error. One that leaves the card unusable is that, too: the run
then begins again in a new process with what is missing. `--seconds` ends the run in time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention_measure as measure
import torch
from attention_peers import BLOCK_SIZE, PEERS, Call, Case, Problem
from attention_report import Row, compare, line, plot, scale_warm, write
from torch import Tensor

import pagetide_kernels as pk

# In the order of their worth, should time run out: what is asked of decode, prefill, the rest.
CASES = [
    Case("qwen2-0.5b decode", 14, 2, 64, 512, 1),
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
    Case("llama-8b chunk", 32, 8, 128, 8192, 4, 512),
    Case("llama-8b prefill", 32, 8, 128, 8192, 1, 8192),
    Case("llama-8b decode", 32, 8, 128, 4096, 32),  # 512 MB of keys and values: what INT8 is for
    Case("qwen2-0.5b decode", 14, 2, 64, 512, 4),
    *(Case("qwen2-0.5b decode", 14, 2, 64, 512, batch, is_warm=True) for batch in (1, 2, 4, 8)),
]
QUICK = (0, 3, 4, 7, 12)  # a small, a ragged, a ratio of 1, a long one, and a prefill
SECONDS_A_KERNEL = 40
SECONDS_A_WARM_UP = 90  # importing vLLM is in it


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in whatever Python code still runs then."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def ours(
    name: str, case: Case, problems: list[Problem], kv_dtype: str
) -> tuple[list[Call], Call, Tensor]:
    """One call a problem, one that prepares a step, and the float32 answer."""
    device = problems[0].q.device
    shape = pk.AttentionShape(
        case.num_heads, case.num_kv_heads, case.head_dim, BLOCK_SIZE, torch.float16, kv_dtype
    )
    backend = pk.select_backend(name, shape, device.type)
    num_tokens = case.batch * case.query_len
    calls: list[Call] = []
    for problem in problems:
        k, v = problem.k, problem.v
        scales: dict[str, Tensor | None] = {"k_scales": None, "v_scales": None}
        if kv_dtype == "int8":
            k, scales["k_scales"] = measure.quantized(k)
            v, scales["v_scales"] = measure.quantized(v)
        unprepared = pk.AttentionMetadata(
            query_start_loc=problem.starts,
            seq_lens=problem.lens,
            rows=torch.arange(case.batch, dtype=torch.int32, device=device),
            block_tables=problem.table,
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
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
            answer = measure.exact(case, problem, *dense)
            del dense

    def prepare() -> Tensor:
        backend.prepare(step, shape)
        return out

    return calls, prepare, answer


def measure_kernel(
    kernel: str, case: Case, problems: list[Problem], truth: Tensor, ceilings: dict[str, float]
) -> Row:
    """One kernel's row of a case.

    Args:
        kernel: a peer, or a back end of ours, with " int8" behind it for an INT8 cache.
        case: sizes.
        problems: what it is given in turn.
        truth: the float32 answer for a float16 cache.
        ceilings: the card's, from `measure_ceilings`.
    """
    is_int8 = kernel.endswith(" int8")
    row: Row = {}
    if kernel in PEERS:
        calls = PEERS[kernel](case, problems)
    else:
        kv_dtype = "int8" if is_int8 else "float16"
        calls, prepare, truth = ours(kernel.split()[0], case, problems, kv_dtype)
        if not is_int8:
            row["prepare_us"] = round(measure.timed([prepare]), 2)
    got = calls[0]()[: len(truth)].float()
    error = float((got - truth).norm() / truth.norm())
    us = measure.timed(calls)
    keys = float(problems[0].lens.sum())
    size = keys * case.num_kv_heads * case.head_dim * 2 * (1 if is_int8 else 2)
    visible = case.query_len * keys - case.batch * case.query_len * (case.query_len - 1) / 2
    tb_s, tflop_s = size / us / 1e6, 4 * case.num_heads * case.head_dim * visible / us / 1e6
    share = tb_s / ceilings["copy_tb_s"] if case.is_decode else tflop_s / ceilings["matmul_tflop_s"]
    row |= {
        "us": round(us, 2), "tb_s": round(tb_s, 3), "tflop_s": round(tflop_s, 1),
        "percent_of_ceiling": round(100 * share, 1), "error": float(f"{error:.2e}"),
        "is_correct": error < (2e-2 if is_int8 else 2e-3), "kv_mb": round(size / 1e6, 1),
        "tokens_s": round(case.batch * case.query_len / us * 1e6),
    }  # fmt: skip
    return row


def run_case(case: Case, kernels: list[str], record: Row, options: argparse.Namespace) -> None:
    """Measures what the record lacks of one case, and writes it after every kernel."""
    done = {row["kernel"] for row in record["rows"] if row["case"] == str(case)}
    missing = [kernel for kernel in kernels if kernel not in done]
    if not missing:
        return
    print(case, flush=True)
    problems = measure.make_problems(case)
    truth = measure.exact(case, problems[0], problems[0].k, problems[0].v)
    for kernel in missing:
        row: Row = {
            "case": str(case), "kernel": kernel, "is_peer": kernel in PEERS,
            "batch": case.batch, "is_warm": case.is_warm,
        }  # fmt: skip
        record["rows"].append(row)
        try:
            with at_most(SECONDS_A_KERNEL):
                row |= measure_kernel(kernel, case, problems, truth, record["ceilings"])
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
        compare([row for row in record["rows"] if row["case"] == str(case)])
        write(record, options.out)
        try:
            measure.synchronize()
            measure.release()
        except RuntimeError:  # a sticky error: nothing more can be had of this process
            row["failure"] = row.get("failure", "") + " (the card had to be opened again)"
            write(record, options.out)
            again = [a for a in sys.argv if a != "--resume"]
            os.execv(sys.executable, [sys.executable, *again, "--resume"])
    for row in record["rows"]:
        if row["case"] == str(case):
            print(line(row, is_decode=case.is_decode), flush=True)


def warm_up(cases: list[Case], kernels: list[str]) -> None:
    """Imports and compiles what takes long, FlashInfer's kernels in processes of their own."""
    kinds = {(c.num_heads // c.num_kv_heads >= 4, c.head_dim, c.is_decode): c for c in cases}
    peers = str(Path(__file__).with_name("attention_peers.py"))
    compilers = [
        subprocess.Popen(
            [sys.executable, peers, str(c.num_heads), str(c.num_kv_heads), str(c.head_dim),
             "1" if c.is_decode else "32"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for c in kinds.values() if "flashinfer" in kernels
    ]  # fmt: skip
    for case in kinds.values():
        query_len = 1 if case.is_decode else 32
        small = Case("", case.num_heads, case.num_kv_heads, case.head_dim, 32, 1, query_len)
        problems = measure.make_problems(small)[:1]
        for kernel in kernels:
            if kernel == "flashinfer":
                continue
            # What fails, or takes too long, does so again where it is measured.
            with contextlib.suppress(Exception), at_most(SECONDS_A_WARM_UP):
                if kernel in PEERS:
                    PEERS[kernel](small, problems)[0]()
                else:
                    kv_dtype = "int8" if kernel.endswith(" int8") else "float16"
                    ours(kernel.split()[0], small, problems, kv_dtype)[0][0]()
    for compiler in compilers:
        try:
            compiler.wait(timeout=100)
        except subprocess.TimeoutExpired:
            compiler.kill()


def main() -> None:
    """Print a line a kernel and case; write attention.csv, .json and .png."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five cases")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--backends", default="triton,cuda", help="ours, by name")
    parser.add_argument("--peers", default=",".join(PEERS), help="theirs, by name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after")
    parser.add_argument("--resume", action="store_true", help="keep what the folder has")
    options = parser.parse_args()
    if measure.DEVICE == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no NVIDIA GPU: this benchmark needs one")
    statuses = pk.available_backends(measure.DEVICE)
    kernels = []
    for name in options.backends.split(","):
        if name in statuses and statuses[name].is_available:
            kernels += [name, f"{name} int8"]
        else:
            print(f"{name}: {statuses[name].reason if name in statuses else 'no such back end'}")
    kernels += [name for name in options.peers.split(",") if name in PEERS]
    cases = [CASES[i] for i in QUICK] if options.quick else CASES
    cases = [case for case in cases if options.only in str(case)]
    options.out.mkdir(parents=True, exist_ok=True)
    stored = options.out / "attention.json"
    if options.resume and stored.exists():
        record = json.loads(stored.read_text(encoding="utf-8"))
        record["restarts"] += 1
    else:
        record = {"restarts": 0, "rows": [], "earlier_seconds": 0.0}
        record |= {"torch": torch.__version__, "ceilings": measure.measure_ceilings()}
        if measure.DEVICE == "cuda":
            record["device"] = torch.cuda.get_device_name()
    ceilings = record["ceilings"]
    print(f"{record.get('device', measure.DEVICE)}, torch {torch.__version__}: copy "
          f"{ceilings['copy_tb_s']:.2f} TB/s, float16 matmul "
          f"{ceilings['matmul_tflop_s']:.0f} TFLOP/s", flush=True)  # fmt: skip
    earlier = record["earlier_seconds"]
    with torch.inference_mode():
        if not record["restarts"]:
            warm_up(cases, kernels)
            print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
        for case in cases:
            if earlier + time.monotonic() - began > options.seconds:
                print(f"out of time before {case}", flush=True)
                break
            record["earlier_seconds"] = earlier + time.monotonic() - began
            run_case(case, kernels, record, options)
            measure.release()
    scale_warm(record["rows"])
    for row in record["rows"]:
        if row["is_warm"] and "scaling" in row:
            print(f"{row['case']}: {line(row, is_decode=True).strip()}")
    write(record, options.out)
    if not plot(record["rows"], options.out / "attention.png"):
        print("no plot: matplotlib is not installed, or there is nothing to show")


if __name__ == "__main__":
    main()
