"""Breaks the CUDA sources on purpose, one line at a time, and checks that the tests notice.

    python tests/mutants_cuda.py [--jobs 4] [--only WORD] [--check]

Each mutant is a copy of the package with one replacement, compiled for the card at hand; the
contract runs on it and must fail. ``--check`` only applies the replacements, which needs no GPU. A
survivor means that a line could be wrong without anybody noticing. Removed barriers are races: run
those again under ``compute-sanitizer --tool racecheck`` if one survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent
FILES = ("test_contract.py", "test_quantized_cache.py", "test_copy_blocks.py")
ON_THE_GPU = Semaphore(6)  # compiles overlap freely; tests share one card's memory


@dataclass(frozen=True)
class Mutant:
    """One line made wrong: what it would mean, where, and how."""

    name: str
    source: str
    old: str
    new: str = ""

    def apply(self, csrc: Path) -> None:
        """Rewrites the source in a copy of ``csrc``."""
        path = csrc / self.source
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its line occurs {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


MUTANTS = (
    # decode: the ring, the leaves, the meeting of thread blocks
    Mutant(
        "a leaf is merged before all warps have finished it", "decode.cuh",
        "__syncthreads();  // every warp's state of the last leaf is in shared memory",
    ),
    Mutant(
        "a warp does not wait for the leaf before", "decode.cuh",
        "wait_for(&finished, num_announced * Engine::WARPS);",
    ),
    Mutant(
        "a stage of the ring is overwritten early", "decode.cuh",
        "copier.start_next(tile);",
        "copier.start_next(tile + Memory::STAGE_BYTES == ring_end ? ring"
        " : tile + Memory::STAGE_BYTES);",
    ),
    Mutant(
        "a tile is used before its copy has landed", "decode.cuh", "wait_copies<STAGES - 1>",
        "wait_copies<STAGES>",
    ),
    Mutant("a leaf goes on from the one before", "decode.cuh", "      engine.reset();\n"),
    Mutant(
        "the last block merges the leaves backwards", "decode.cuh",
        "static_cast<int64_t>(leaf) * heads;\n            totals",
        "static_cast<int64_t>(visible_leaf + visible_end - 1 - leaf) * heads;\n            totals",
    ),
    Mutant("arrivals are not counted from zero again", "decode.cuh", "if (is_last) *arrival = 0;"),
    Mutant(
        "the first block to arrive merges", "decode.cuh",
        "atomicAdd(arrival, 1) == item.num_items - 1", "atomicAdd(arrival, 1) == 0",
    ),
    Mutant(
        "a cluster's first block takes its own leaf for the others'", "decode.cuh",
        "in_block(leaves_smem + place * STATE_FLOATS, rank)",
        "in_block(leaves_smem + place * STATE_FLOATS, 0)",
    ),
    Mutant(
        "padding tokens are not zeroed", "decode.cuh",
        "if (row_tile == 0) zero_padding<Engine>(p, kv_head, item.num_step_tokens + run,"
        " p.num_items);",
    ),
    Mutant(
        "a window's first tiles are left out", "decode_copy.cuh",
        "max(0, first_position - p.window + 1) : 0;", "max(0, first_position - p.window + 65) : 0;",
    ),
    # the engines
    Mutant(
        "CUDA cores: a query sees the key behind it", "decode_simt.cuh",
        "key_position <= positions[r] &&", "key_position <= positions[r] + 1 &&",
    ),
    Mutant(
        "CUDA cores: a part of each dot product is left out", "decode_simt.cuh",
        "int distance = TILE; distance < WARP;", "int distance = 2 * TILE; distance < WARP;",
    ),
    Mutant(
        "CUDA cores: values take the scales of keys", "decode_simt.cuh",
        "weight * scales_smem[TILE + key]", "weight * scales_smem[key]",
    ),
    Mutant(
        "CUDA cores: a key takes its neighbour's scale", "decode_simt.cuh",
        "s[r] *= scales_smem[key]", "s[r] *= scales_smem[key ^ 1]",
    ),
    Mutant(
        "CUDA cores: half of the sum's lanes are left out", "decode_simt.cuh",
        "distance < TILE; distance *= 2) l +=", "distance < TILE / 2; distance *= 2) l +=",
    ),
    Mutant(
        "tensor cores: the upper eight keys are masked like the lower", "decode_mma.cuh",
        "first_key + g + j / 2 * 8;", "first_key + g;",
    ),
    Mutant(
        "tensor cores: a window of one key more", "decode_mma.cuh",
        "key > position - p.window", "key >= position - p.window",
    ),
    Mutant(
        "tensor cores: a sum without the lanes across", "decode_mma.cuh",
        "int distance = 4; distance < WARP; distance *= 2) l +=",
        "int distance = 8; distance < WARP; distance *= 2) l +=",
    ),
    Mutant(
        "tensor cores: the second eight rows are the first", "decode_mma.cuh",
        "column] = acc[r][i][2 * half + j];", "column] = acc[0][i][2 * half + j];",
    ),
    Mutant(
        "tensor cores: weights stay with the lanes that computed them", "decode_mma.cuh",
        "transpose_matrix(pack<T>(x[0], x[1]))", "pack<T>(x[0], x[1])",
    ),
    Mutant(
        "tensor cores: a key takes the scale of the one eight before", "decode_mma.cuh",
        "k_scales[half] = scales_smem[g + 8 * half]", "k_scales[half] = scales_smem[g]",
    ),
    Mutant(
        "tensor cores: values take the scales of keys", "decode_mma.cuh",
        "log2_approx(scales_smem[TILE + g + 8 * half])", "log2_approx(scales_smem[g + 8 * half])",
    ),
    Mutant(
        "a tile's second eight keys take the block of its first", "decode_copy.cuh",
        "__shfl_sync(ALL_LANES, tile_blocks, group)", "__shfl_sync(ALL_LANES, tile_blocks, 0)",
    ),
    Mutant(
        "every key takes the scale of its block's first", "decode_copy.cuh",
        "head_scales + block * strides.block + slot * strides.slot",
        "head_scales + block * strides.block",
    ),
    # prefill
    Mutant(
        "prefill: a query sees the key behind it", "prefill.cuh",
        "key > position || key", "key > position + 1 || key",
    ),
    Mutant(
        "prefill: a diagonal tile goes unmasked", "prefill.cuh",
        "first_key + KEYS - 1 > first_position ||", "first_key + KEYS - 1 > last_position ||",
    ),
    Mutant(
        "prefill: a window of one key more", "prefill.cuh",
        "position - p.window + 1 : 0;\n#pragma unroll\n          for", "position - p.window : 0;\n"
        "#pragma unroll\n          for",
    ),
    Mutant(
        "prefill: the barrier between tiles is gone", "prefill.cuh",
        "__syncthreads();  // every thread's part of the tile has landed, and all warps have used"
        " the tile before",
    ),
    Mutant(
        "prefill: the next tile overwrites this one", "prefill.cuh",
        "start_copy(tile + 1, stage ^ 1, next_blocks)", "start_copy(tile + 1, stage, next_blocks)",
    ),
    Mutant(
        "prefill: the sum is not brought to the new maximum", "prefill.cuh",
        "sum.l = __fmaf_rn(sum.l, shrink, added)", "sum.l = __fadd_rn(sum.l, added)",
    ),
    # prefill on Hopper
    Mutant(
        "Hopper: a query sees the key behind it", "prefill_consumer.cuh",
        "if (key > last || key < first)", "if (key > last + 1 || key < first)",
    ),
    Mutant(
        "Hopper: a diagonal tile goes unmasked", "prefill_consumer.cuh",
        "first_key + KEYS - 1 > range.first_position ||",
        "first_key + KEYS - 1 > range.last_position ||",
    ),
    Mutant(
        "Hopper: a window of one key more", "prefill_consumer.cuh",
        "last - p.window + 1 : -KEYS", "last - p.window : -KEYS",
    ),
    Mutant(
        "Hopper: the sum is not brought to the new maximum", "prefill_consumer.cuh",
        "__fmaf_rn(sum.l, shrink[half], __fadd_rn(added[0], added[1]))",
        "__fadd_rn(sum.l, __fadd_rn(added[0], added[1]))",
    ),
    Mutant(
        "Hopper: O is never brought to the new maximum", "prefill_consumer.cuh",
        "__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f)", "false",
    ),
    Mutant(
        "Hopper: values are used before they have landed", "prefill_consumer.cuh",
        "wait(shared.values.full[v_place.stage], v_place.parity);",
    ),
    Mutant(
        "Hopper: a job goes on with the sums of the one before", "prefill_consumer.cuh",
        "sums[half] = SoftmaxSum{};",
    ),
    Mutant(
        "Hopper: the second panel of values is the first's neighbour", "prefill_consumer.cuh",
        "KeyPanel::BYTES,\n                          8 * KeyPanel::ROW_BYTES);",
        "8 * KeyPanel::ROW_BYTES,\n                          8 * KeyPanel::ROW_BYTES);",
    ),
    Mutant(
        "Hopper: keys are overwritten while they are read", "prefill_producer.cuh",
        "wait(shared.keys.empty[k_place.stage], k_place.parity ^ 1);",
    ),
    Mutant(
        "Hopper: rows behind the sequence's end are read", "prefill_producer.cuh",
        "first_key + first_row + first < end_key &&", "",
    ),
    Mutant(
        "Hopper: the next launch draws its jobs from where this one stopped",
        "prefill_producer.cuh", "if (drawn == num_jobs - 1) *p.arrivals = 0;",
    ),
    # tiles, states, the work list
    Mutant(
        "rows behind the sequence's end are read", "tile.cuh",
        "key < end_key ? valid_bytes<T>(chunk * Layout::CHUNK, head_dim) : 0",
        "valid_bytes<T>(chunk * Layout::CHUNK, head_dim)",
    ),
    Mutant(
        "eight keys take the block before", "tile.cuh",
        "__shfl_sync(ALL_LANES, blocks, row / 8);\n    const int bytes",
        "__shfl_sync(ALL_LANES, blocks, row / 16);\n    const int bytes",
    ),
    Mutant("a sum is not brought to the new maximum", "softmax_state.cuh",
           "    l = __fmul_rn(l, shrink);\n"),
    Mutant("a row that saw no key is NaN", "softmax_state.cuh",
           "return m == -INF ? 0.0f : m;", "return m;"),
    Mutant("every row tile is the first", "work_list.cu", "item.first_row = i * cut.run;",
           "item.first_row = 0;"),
    Mutant("a thread block does not go on to its next sequence", "work_list.cu",
           "if (i < cut.num_items - 1) item.next = -1;", "item.next = -1;"),
    Mutant(
        "the cut depends on the batch", "work_list.cu",
        "keys * p.few_leaves < seq_len)", "keys * p.few_leaves < seq_len + 256 * p.num_seqs)",
    ),
    Mutant(
        "sequences leave their states in one place", "work_list.cu",
        "cut.item.first_state = state_end + states.before;", "cut.item.first_state = state_end;",
    ),
    # the cache's writers
    Mutant("padding tokens are stored", "store.cu",
           "  if (token >= __ldg(p.query_start_loc + p.num_seqs)) return;\n"),
    Mutant("INT8 values are cut, not rounded", "store.cu", "rintf(", "truncf("),
    Mutant("values are stored as keys", "store.cu", "> side(p, blockIdx.y == 1);\n  const",
           "> side(p, false);\n  const"),
    Mutant("a block's earlier tokens keep their old scale", "store.cu",
           "if (scale != old_scale) {", "if (false) {"),
)  # fmt: skip


def prepare(mutant: Mutant | None, scratch: Path) -> None:
    """A copy of what is compiled and imported, with the mutant's line made wrong."""
    shutil.copytree(PACKAGE / "csrc", scratch / "csrc")
    shutil.copy(PACKAGE / "build_cuda.py", scratch)
    package = PACKAGE / "src" / "pagetide_kernels"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(package, scratch / package.name, ignore=ignored)
    if mutant is not None:
        mutant.apply(scratch / "csrc")


def build(scratch: Path, objects: Path, architecture: str) -> None:
    """Compiles the copy; sources that the mutant leaves alone come from ``objects``."""
    if objects.exists():
        shutil.copytree(objects, scratch / "build" / "cuda-objects")
    command = [sys.executable, str(scratch / "build_cuda.py"), "--archs", architecture]
    output = str(scratch / "pagetide_kernels" / "_lib")
    subprocess.run([*command, "--output", output], check=True, capture_output=True)


def passes(scratch: Path, *, is_told: bool = False) -> bool:
    """Whether the contract holds on a built copy; a failure is printed if it ``is_told``."""
    path = os.pathsep.join([str(scratch), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PAGETIDE_BACKENDS": "cuda",
                   "PAGETIDE_ISOLATED": "0"}  # fmt: skip
    for name in ("PAGETIDE_CONTRACT_CASES", "PAGETIDE_SHARD"):  # the plain set, all of it
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-k", "not beyond_32 and not many_steps"]
    command += [str(TESTS / name) for name in FILES]
    with ON_THE_GPU:
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            return False  # a hang is noticed, too
    if is_told and run.returncode:
        print(run.stdout[-3000:], run.stderr[-1000:], flush=True)
    if run.returncode not in (0, 1) and run.returncode > 0:
        raise RuntimeError(f"pytest could not run\n{run.stdout}{run.stderr}")
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4, help="mutants that are compiled at a time")
    parser.add_argument("--only", default="", help="mutants whose name holds this word")
    parser.add_argument("--check", action="store_true", help="only apply them")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.check:
            for index, mutant in enumerate(chosen):
                prepare(mutant, root / str(index))
            print(f"{len(chosen)} mutants apply")
            return 0

        import torch

        major, minor = torch.cuda.get_device_capability()
        architecture = f"{major}{minor}" + ("a" if major == 9 else "")
        prepare(None, root / "whole")
        build(root / "whole", root / "no objects yet", architecture)
        if not passes(root / "whole", is_told=True):
            raise SystemExit("the tests fail on the sources as they are")
        objects = root / "whole" / "build" / "cuda-objects"

        def survives(mutant: Mutant) -> bool:
            scratch = root / mutant.name.replace(" ", "-").replace("'", "")
            prepare(mutant, scratch)
            build(scratch, objects, architecture)
            survived = passes(scratch)
            shutil.rmtree(scratch)
            return survived

        survivors = 0
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, survived in zip(chosen, pool.map(survives, chosen), strict=True):
                word = "SURVIVED" if survived else "caught  "
                print(f"{word}  {mutant.source:18s} {mutant.name}", flush=True)
                survivors += survived
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
