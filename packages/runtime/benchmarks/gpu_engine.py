"""The engine on a GPU, plainly driven: tokens/s, and a step's time split into host and device.

    python benchmarks/gpu_engine.py MODEL [--concurrency 1,32,256] [--backend triton] [--json FILE]

Prompts of 16 to 128 random tokens, 64 new tokens each, greedy, prefill included, fp16: the load of
the engines that this is compared with. A step's host time is what the CPU spends planning,
submitting and taking in; its device time is what lies between two events around the work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from pagetide_kvcache import BlockManager
from pagetide_models import load_model
from pagetide_runtime import EngineConfig, SamplingParams
from pagetide_runtime.build import build_engine, make_block_manager
from pagetide_runtime.engine import Engine

NEW_TOKENS = 64


def generate(engine: Engine, prompts: list[list[int]]) -> float:
    """Seconds until every prompt has its 64 tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def split_decode_step(engine: Engine, prompts: list[list[int]]) -> dict[str, float]:
    """Median microseconds of a decode step's parts."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    parts: dict[str, list[float]] = {
        name: [] for name in ("schedule", "submit", "wait", "update", "device")
    }
    scheduler, runner = engine.scheduler, engine.runner
    while engine.has_unfinished:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        t0 = time.perf_counter()
        plan = scheduler.schedule()
        t1 = time.perf_counter()
        events[0].record()
        handle = runner.submit(plan)
        events[1].record()
        t2 = time.perf_counter()
        result = handle.result()
        t3 = time.perf_counter()
        scheduler.update(plan, result)
        t4 = time.perf_counter()
        events[1].synchronize()
        if plan.num_tokens == len(prompts):
            device = events[0].elapsed_time(events[1]) * 1e-3
            for name, value in zip(
                parts, (t1 - t0, t2 - t1, t3 - t2, t4 - t3, device), strict=True
            ):
                parts[name].append(value * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--concurrency", default="1,32,256")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = load_model(
        arguments.model, device="cuda", dtype="float16", attention_backend=arguments.backend,
        kv_dtype=arguments.kv_dtype,
    )  # fmt: skip
    rng = random.Random(0)
    records = []
    for concurrency in map(int, arguments.concurrency.split(",")):
        config = EngineConfig(
            device="cuda", num_blocks=concurrency * 16, enable_prefix_cache=False,
            max_num_seqs=concurrency, max_num_batched_tokens=8192, max_plans_in_flight=1,
        )  # fmt: skip
        manager: BlockManager = make_block_manager(model, config)
        engine = build_engine(model, config, manager)
        prompts = [
            [rng.randrange(10, 40_000) for _ in range(rng.randint(16, 128))]
            for _ in range(concurrency)
        ]
        generate(engine, prompts)
        seconds = statistics.median(generate(engine, prompts) for _ in range(3))
        record = {
            "concurrency": concurrency,
            "tokens_per_second": round(concurrency * NEW_TOKENS / seconds),
            "decode_step_us": split_decode_step(engine, prompts),
        }
        records.append(record)
        print(json.dumps(record), flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {
                    "card": torch.cuda.get_device_name(), "torch": torch.__version__,
                    "backend": model.backend.name, "model": arguments.model.name,
                    "records": records,
                },
                indent=1,
            )
        )  # fmt: skip


if __name__ == "__main__":
    main()
