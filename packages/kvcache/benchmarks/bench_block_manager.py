"""What a block costs, by the size of the pool: allocate, free, evict, look up, commit.

    python packages/kvcache/benchmarks/bench_block_manager.py [--sizes 1000 ...] [--json FILE]

Every figure is taken in a pool that is full: of running sequences for `allocate` and `free`, of
cached blocks for the others, in sequences of 64 blocks of 16 tokens, chosen at random so that a
large pool's books are as cold as they are in service. A pass works on at least 8,000 blocks; the
median of the passes counts, and the least is beside it. Time is the process's processor time. The
pool of ten million blocks needs about 4 GB of memory, nearly all of it for its keys.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from pagetide_kvcache import BlockManager

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 64
TOKENS_PER_SEQUENCE = BLOCK_SIZE * BLOCKS_PER_SEQUENCE
MIN_BLOCKS_PER_PASS = 8_000
TARGETS = {  # microseconds a block, at most
    "allocate": 0.5,
    "free": 0.5,
    "evict": 0.5,
    "free_cached": 0.5,
    "lookup": 1.2,
    "admit_hit": 1.2,
    "commit": 1.2,
    "commit_one": None,
}
DESCRIPTIONS = {
    "allocate": "allocate from freed blocks",
    "free": "free",
    "evict": "allocate by eviction",
    "free_cached": "free, block stays findable",
    "lookup": "match_prefix, all found",
    "admit_hit": "admit, all but one found",
    "commit": "commit a prompt",
    "commit_one": "commit one block a call",
}

Samples = dict[str, list[float]]


def text(number: int) -> array[int]:
    """The tokens of one sequence: random, the same for the same number."""
    tokens = array("i")
    tokens.frombytes(random.Random(number).randbytes(4 * TOKENS_PER_SEQUENCE))
    return tokens


def microseconds_a_block(call: Callable[[int], object], arguments: Iterable[int]) -> float:
    arguments = list(arguments)
    start = time.process_time()  # not the wall clock: others may be using the machine
    for argument in arguments:
        call(argument)
    elapsed = time.process_time() - start
    return elapsed / (len(arguments) * BLOCKS_PER_SEQUENCE) * 1e6


class Pass:
    """How one pass goes over the sequences: enough of them, several times if they are few."""

    def __init__(self, num_sequences: int, rng: random.Random) -> None:
        wanted = -(-MIN_BLOCKS_PER_PASS // BLOCKS_PER_SEQUENCE)
        self.num_rounds = -(-wanted // num_sequences)
        self.num_chosen = min(wanted, num_sequences)
        self.num_sequences = num_sequences
        self.rng = rng

    def choose(self) -> list[int]:
        return self.rng.sample(range(self.num_sequences), self.num_chosen)


def measure_running(total_blocks: int, repeats: int) -> Samples:
    """A pool full of running sequences: random ones leave, others take their place."""
    num_sequences = total_blocks // BLOCKS_PER_SEQUENCE
    manager = BlockManager(total_blocks, BLOCK_SIZE)
    for seq_id in range(num_sequences):
        manager.allocate_blocks(seq_id, BLOCKS_PER_SEQUENCE)
    work = Pass(num_sequences, random.Random(1))

    def allocate(number: int) -> None:
        manager.allocate_blocks(number, BLOCKS_PER_SEQUENCE)

    samples: Samples = {"allocate": [], "free": []}
    for _ in range(repeats):
        free, taken = [], []
        for _ in range(work.num_rounds):
            chosen = work.choose()
            free.append(microseconds_a_block(manager.free_sequence, chosen))
            taken.append(microseconds_a_block(allocate, chosen))
        samples["free"].append(statistics.fmean(free))
        samples["allocate"].append(statistics.fmean(taken))
    return samples


def measure_cached(total_blocks: int, repeats: int) -> Samples:
    """A pool full of cached blocks: prompts are looked up, admitted, and evicted by others."""
    num_sequences = total_blocks // BLOCKS_PER_SEQUENCE
    manager = BlockManager(total_blocks, BLOCK_SIZE)
    for number in range(num_sequences):
        manager.admit(number, array("i"), TOKENS_PER_SEQUENCE)
        manager.commit(number, text(number), TOKENS_PER_SEQUENCE)
    for number in range(num_sequences):
        manager.free_sequence(number)
    gc.freeze()
    work = Pass(num_sequences, random.Random(2))
    samples: Samples = {name: [] for name in TARGETS if name not in ("allocate", "free")}
    texts: dict[int, array[int]] = {}  # made before the clock starts

    def admit(number: int) -> None:
        manager.admit(number, texts[number], TOKENS_PER_SEQUENCE)

    def allocate(number: int) -> None:
        manager.allocate_blocks(number, BLOCKS_PER_SEQUENCE)

    def look_up(number: int) -> None:
        manager.match_prefix(texts[number])

    def commit(number: int) -> None:
        manager.commit(number, texts[number], TOKENS_PER_SEQUENCE)

    def commit_block_by_block(number: int) -> None:
        tokens = texts[number]
        for num_tokens in range(BLOCK_SIZE, TOKENS_PER_SEQUENCE + 1, BLOCK_SIZE):
            manager.commit(number, tokens, num_tokens)

    oldest, newest = 0, num_sequences
    for _ in range(repeats):
        figures: Samples = {name: [] for name in samples}
        for _ in range(work.num_rounds):
            # Look up and admit prompts from anywhere in the cache.
            chosen = [oldest + index for index in work.choose()]
            texts.update((number, text(number)) for number in chosen)
            figures["lookup"].append(microseconds_a_block(look_up, chosen))
            figures["admit_hit"].append(microseconds_a_block(admit, chosen))
            for number in chosen:
                commit(number)
            figures["free_cached"].append(microseconds_a_block(manager.free_sequence, chosen))
            texts.clear()
            # New prompts take the place of the oldest.
            fresh = list(range(newest, newest + work.num_chosen))
            texts.update((number, text(number)) for number in fresh)
            figures["evict"].append(microseconds_a_block(allocate, fresh))
            figures["commit"].append(microseconds_a_block(commit, fresh[::2]))
            figures["commit_one"].append(microseconds_a_block(commit_block_by_block, fresh[1::2]))
            for number in fresh:
                manager.free_sequence(number)
            texts.clear()
            oldest, newest = oldest + work.num_chosen, newest + work.num_chosen
        for name, values in figures.items():
            samples[name].append(statistics.fmean(values))
    gc.unfreeze()
    return samples


def measure(total_blocks: int, repeats: int) -> dict[str, dict[str, float]]:
    samples = measure_running(total_blocks, repeats)
    gc.collect()
    samples.update(measure_cached(total_blocks, repeats))
    gc.collect()
    return {
        name: {"median": statistics.median(samples[name]), "min": min(samples[name])}
        for name in TARGETS
    }


def print_table(results: dict[int, dict[str, dict[str, float]]]) -> None:
    print(f"Microseconds a block of {BLOCK_SIZE}: median (least) of the passes")
    print(f"{'blocks in the pool':28}" + "".join(f"{size:>16,}" for size in results) + "  target")
    for name, target in TARGETS.items():
        row = f"{DESCRIPTIONS[name]:28}"
        for result in results.values():
            row += f"{result[name]['median']:>9.3f} ({result[name]['min']:.2f})"
        print(row + (f"  <= {target}" if target else "  -"))


def plot(results: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in TARGETS:
        medians = [result[name]["median"] for result in results.values()]
        axes.plot(list(results), medians, marker="o", label=DESCRIPTIONS[name])
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("blocks in the pool")
    axes.set_ylabel("microseconds a block")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10**exponent for exponent in range(3, 8)]
    )
    parser.add_argument("--repeats", type=int, default=7, help="passes a size")
    parser.add_argument("--json", type=Path, default=Path("block_manager.json"))
    parser.add_argument("--plot", type=Path, help="where to draw the curve, with matplotlib")
    arguments = parser.parse_args()
    if min(arguments.sizes) < BLOCKS_PER_SEQUENCE or arguments.repeats < 1:
        parser.error(f"sizes must be at least {BLOCKS_PER_SEQUENCE} and repeats at least 1")
    results = {size: measure(size, arguments.repeats) for size in arguments.sizes}
    print_table(results)
    report = {
        "unit": "microseconds of processor time a block",
        "block_size": BLOCK_SIZE,
        "blocks_per_sequence": BLOCKS_PER_SEQUENCE,
        "repeats": arguments.repeats,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "targets": TARGETS,
        "results": results,
    }
    arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {arguments.json}")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
