"""The CPU engine beside transformers, on the same cores in the same run.

    python benchmarks/cpu_engine.py MODEL.gguf [--rounds 3] [--json record.json]

Eight prompts of 40 tokens, 64 new tokens each, greedy, fp32: through our engine in one batch,
through transformers' `generate` one at a time and as one padded batch; and one request alone in
both. The systems take turns, so that a machine whose speed drifts does not favour one; the median
of each and the ratios are printed. Both get the same threads and weights; tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pagetide_runtime import LLM, SamplingParams

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 40, 64


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    tokens = run()
    return time.perf_counter() - start, tokens


def first_token_seconds(model: Path) -> dict[str, float]:
    """From the shell to the first token: a process of its own, with its parts."""
    code = """
import sys, time
started = float(sys.argv[2])
parts = {"python": time.time() - started}
from pagetide_models import open_model
source = open_model(sys.argv[1]); source.load_tokenizer()
parts["header and tokenizer"] = time.time() - started - sum(parts.values())
import torch
parts["import torch"] = time.time() - started - sum(parts.values())
from pagetide_runtime import LLM, SamplingParams
llm = LLM(source, device="cpu", progress=False)
parts["load weights"] = time.time() - started - sum(parts.values())
stream = llm.stream(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
next(stream)
parts["first token"] = time.time() - started - sum(parts.values())
parts["total"] = time.time() - started
import json; print(json.dumps(parts))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(time.time())],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    parts: dict[str, float] = json.loads(done.stdout)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import transformers

    starts = [first_token_seconds(arguments.model) for _ in range(3)]
    start = sorted(starts, key=lambda parts: parts["total"])[1]
    print("shell to first token, seconds:", {k: round(v, 2) for k, v in start.items()}, flush=True)

    llm = LLM(arguments.model, device="cpu", enable_prefix_cache=False, progress=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model.parent, gguf_file=arguments.model.name, dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 40_000, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def ours(count: int) -> list[list[int]]:
        return [list(c.token_ids) for c in llm.generate(prompts[:count].tolist(), params)]

    @torch.inference_mode()
    def theirs(batch: torch.Tensor) -> list[list[int]]:
        out = reference.generate(
            batch, attention_mask=torch.ones_like(batch), do_sample=False,
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=2,
        )  # fmt: skip
        return out[:, batch.shape[1] :].tolist()  # type: ignore[no-any-return]

    systems: dict[str, Callable[[], list[list[int]]]] = {
        "ours, 8 in one batch": lambda: ours(NUM_PROMPTS),
        "transformers, 8 one at a time": lambda: [theirs(p[None])[0] for p in prompts],
        "transformers, 8 padded": lambda: theirs(prompts),
        "ours, 1 alone": lambda: ours(1),
        "transformers, 1 alone": lambda: theirs(prompts[:1]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    tokens: dict[str, list[list[int]]] = {}
    for round_ in range(arguments.rounds + 1):  # the first round warms up
        for name, run in systems.items():
            elapsed, tokens[name] = timed(run)
            if round_:
                seconds[name].append(elapsed)
    rates = {
        name: (1 if "alone" in name else NUM_PROMPTS) * NEW_TOKENS / statistics.median(times)
        for name, times in seconds.items()
    }
    for name, rate in rates.items():
        print(f"{name:32s} {rate:8.1f} tokens/s")
    together = rates["ours, 8 in one batch"]
    ratios = {
        "batch over one at a time (at least 6)": together / rates["transformers, 8 one at a time"],
        "batch over padded batch (at least 1.3)": together / rates["transformers, 8 padded"],
        "alone over alone (at least 1.4)": rates["ours, 1 alone"] / rates["transformers, 1 alone"],
    }
    for name, ratio in ratios.items():
        print(f"{name:40s} {ratio:5.2f}")
    same = sum(
        a == b
        for one, other in zip(tokens["ours, 8 in one batch"], tokens["transformers, 8 padded"],
                              strict=True)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip
    print(f"equal tokens: {same} of {NUM_PROMPTS * NEW_TOKENS}")
    if arguments.json:
        record = {
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "torch": torch.__version__, "transformers": transformers.__version__,
            "threads": torch.get_num_threads(), "tokens_per_second": rates, "ratios": ratios,
            "first_token_seconds": start, "equal_tokens": same,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
