"""Breaks the CUDA sources on purpose, one line at a time, and checks that the tests notice.

    python packages/kernels/tests/mutants_cuda.py [--jobs 8] [--only WORD] [--json FILE]
    python packages/kernels/tests/mutants_cuda.py --build DIR --arch 90a     # needs no GPU
    python packages/kernels/tests/mutants_cuda.py --run DIR                  # what was built there
    python packages/kernels/tests/mutants_cuda.py --check                    # only replaces lines

Each mutant is a library of which a few kernels were compiled with one replacement, and the others
as they are; the part of the contract that runs those kernels must fail on it. A survivor means that
a line could be wrong without anybody noticing. Removed barriers are races: run those again under
``compute-sanitizer --tool racecheck`` if one survives.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import mutation
from mutants_build import Builder, Unit, apply_to_sources
from mutation import Mutant

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent

SIMT, SIMT_INT8 = Unit("decode_simt_f32", "64>"), Unit("decode_simt_i8", "64>")
MMA, MMA_INT8 = Unit("decode_mma_f16", " 64, "), Unit("decode_mma_f16_i8", " 64, ")
# What a kind of mutant is compiled into, and the tests that run it.
UNITS = {
    "simt": (SIMT,),
    "simt int8": (SIMT_INT8,),
    "mma": (MMA,),
    "mma int8": (MMA_INT8,),
    "decode": (SIMT, MMA),
    # Narrower heads are Hopper's own kernel's.
    "prefill": (Unit("prefill_f16", " 256>"), Unit("prefill_bf16", " 256>")),
    "prefill int8": (Unit("prefill_f16_i8", " 256>"), Unit("prefill_bf16_i8", " 256>")),
    "hopper": (Unit("prefill_hopper_f16", " 64>"), Unit("prefill_hopper_f16", " 128>")),
    "hopper int8": (Unit("prefill_hopper_f16_i8", " 64>"), Unit("prefill_hopper_f16_i8", " 128>")),
    "work list": (Unit("work_list"),),
    "store": (Unit("store"),),
}
SELECTIONS = {
    "simt": (
        "test_p2 or test_p4 or test_any_order or test_queries_that or test_a_padding or"
        " test_buffers or test_one_prep or float32xfloat32 or"
        " torch.float32 and not float16 and not int8"
    ),
    "simt int8": "(torch.float32 or float32xint8 or test_keys_and) and int8",
    "mma": "(torch.float16 or float16xfloat16) and not int8",
    "mma int8": "(torch.float16 or float16xint8) and int8",
    "decode": (
        "test_queries_that or test_a_padding or test_a_full_card or test_long_contexts and"
        " (torch.float32 or torch.float16) and not int8 or level_1 and torch.float32 or"
        " float32xfloat32 or float16xfloat16"
    ),
    "prefill": (
        "(test_tiles_and or test_more_tiles) and 256 and not int8 or"
        " test_scores_may and 160 and not int8 or"
        " (float16xfloat16 or bfloat16xbfloat16) and (x160 or x192 or x256)"
    ),
    "hopper": "(torch.float16 or float16xfloat16) and not int8",
    "prefill int8": (
        "test_more_tiles and 256 and int8 or"
        " (float16xint8 or bfloat16xint8) and (x160 or x192 or x256)"
    ),
    "hopper int8": "(torch.float16 or float16xint8) and int8",
    "work list": (
        "test_buffers or test_a_full_card or (test_p1 or level_1 or test_long_contexts) and"
        " (torch.float32 or torch.float16) and not int8"
    ),
    "store": "test_stores or test_quantized or test_queries_and or test_keys_and",
}
# The kind of a source's mutants, unless they name another.
KINDS = {
    "decode.cuh": "decode",
    "decode_copy.cuh": "decode",
    "decode_walk.cuh": "decode",
    "decode_simt.cuh": "simt",
    "decode_mma.cuh": "mma",
    "prefill.cuh": "prefill",
    "prefill_output.cuh": "prefill",
    "prefill_consumer.cuh": "hopper",
    "prefill_producer.cuh": "hopper",
    "prefill_hopper_tiles.cuh": "hopper int8",
    "prefill_widening.cuh": "hopper int8",
    "prefill_scales.cuh": "hopper int8",
    "tile.cuh": "prefill",
    "softmax_state.cuh": "decode",
    "work_list.cu": "work list",
    "work_list_cut.cuh": "work list",
    "store.cu": "store",
}

MUTANTS = (
    # decode: the ring, the leaves, the meeting of thread blocks
    Mutant(
        "a leaf is merged before all warps have finished it", "decode.cuh",
        "__syncthreads();  // every warp's state of the last leaf is in shared memory",
    ),
    Mutant(
        "a warp does not wait for the leaf before", "decode.cuh",
        "wait(meeting.finished, (num_announced - 1u) % 2);",
    ),
    Mutant(
        "a stage of the ring is overwritten early", "decode.cuh",
        "if (IS_ASYNC) copier.start_next(tile);",
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
        "static_cast<int64_t>(walk.visible_leaf + walk.visible_end - 1 - leaf) * heads;\n"
        "            totals",
    ),
    Mutant("arrivals are not counted from zero again", "decode.cuh",
           "if (meeting.is_last) *arrival = 0;"),
    Mutant(
        "the block with the last leaves merges, whether the others have arrived or not",
        "decode.cuh", "count_arrival(arrival) == item.num_items - 1",
        "count_arrival(arrival) >= 0 && item.first_leaf > 0",
    ),
    Mutant(
        "a cluster's first block takes one leaf for all of the others'", "decode.cuh",
        "share.read(leaves_smem + (leaf - 1) * STATE_FLOATS, row)",
        "share.read(leaves_smem + (begin - 1) * STATE_FLOATS, row)",
    ),
    Mutant(
        "padding tokens are not zeroed", "decode.cuh",
        "if (row_tile == 0) zero_padding<Engine>(p, kv_head, item.num_step_tokens + run,"
        " p.num_items);",
    ),
    Mutant(
        "a window's first tiles are left out", "decode_walk.cuh",
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
        "weight * scales_smem[TILE + key]", "weight * scales_smem[key]", tests="simt int8",
    ),
    Mutant(
        "CUDA cores: a key takes its neighbour's scale", "decode_simt.cuh",
        "s[r] *= scales_smem[key]", "s[r] *= scales_smem[key ^ 1]", tests="simt int8",
    ),
    Mutant(
        "CUDA cores: half of the sum's lanes are left out", "decode_simt.cuh",
        "distance < TILE; distance *= 2) l +=", "distance < TILE / 2; distance *= 2) l +=",
    ),
    Mutant(
        "tensor cores: the upper eight keys are masked like the lower", "decode_mma.cuh",
        "first_key + 16 * part + g + j / 2 * 8;", "first_key + 16 * part + g;",
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
        "transpose_matrix(pack<T>(pair[0] * v_scale, pair[1] * v_scale))",
        "pack<T>(pair[0] * v_scale, pair[1] * v_scale)",
    ),
    Mutant(
        "tensor cores: a key takes the scale of the one eight before", "decode_mma.cuh",
        "factor * scales_smem[key]", "factor * scales_smem[16 * part + g]",
        tests="mma int8",
    ),
    Mutant(
        "tensor cores: values take the scales of keys", "decode_mma.cuh",
        "IS_QUANTIZED ? scales_smem[TILE + key]", "IS_QUANTIZED ? scales_smem[key]",
        tests="mma int8",
    ),
    Mutant(
        "a tile's second sixteen keys take the block of its first", "decode_copy.cuh",
        "tile_blocks, unit / 8)", "tile_blocks, 0)",
        tests="mma",
    ),
    Mutant(
        "rows behind the sequence's end are read in plain tiles", "decode_copy.cuh",
        "row < num_rows ? 16 : 0", "16",
    ),
    Mutant(
        "scales behind the sequence's end are read", "decode_copy.cuh",
        "4 * max(0, min(4, end_key - key - my_key))", "16", tests="mma int8",
    ),
    Mutant(
        "every key takes the scale of its block's first", "decode_copy.cuh",
        "head_scales + block * strides.block + slot * strides.slot",
        "head_scales + block * strides.block", tests="mma int8",
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
        "__fmaf_rn(sums[half].l, shrink[half], __fadd_rn(added[half][0], added[half][1]))",
        "__fadd_rn(sums[half].l, __fadd_rn(added[half][0], added[half][1]))",
    ),
    Mutant(
        "Hopper: O is never brought to the new maximum", "prefill_consumer.cuh",
        "      if (has_grown) {\n", "      if (false) {\n",
    ),
    Mutant(
        "Hopper: a row follows its maximum in company", "prefill_consumer.cuh",
        "if (x > sums[half].m + slack) {", "if (x > sums[half].m) {",
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
        "Hopper: tiles are overwritten while they are read", "prefill_producer.cuh",
        "wait(ring.empty[place.stage], place.parity ^ 1);",
    ),
    Mutant(
        "Hopper: rows behind the sequence's end are read", "prefill_producer.cuh",
        "first_key + first_row + first < end_key &&", "",
    ),
    Mutant(
        "Hopper: the next launch draws its jobs from where this one stopped",
        "prefill_producer.cuh", "if (drawn == num_jobs - 1) *p.arrivals = 0;",
    ),
    # prefill of INT8 caches
    Mutant(
        "INT8 prefill: queries are not parted", "prefill.cuh",
        "part_queries<Tiles>(q_smem, thread);", tests="prefill int8",
    ),
    Mutant(
        "INT8 prefill: queries are parted before all have landed", "prefill.cuh",
        "    wait_copies<0>();\n    __syncthreads();  // all queries have landed\n",
        tests="prefill int8",
    ),
    Mutant(
        "INT8 prefill: outputs stay parted", "prefill_output.cuh",
        "pack<T>(value(0, 0), value(1, 0));", "pack<T>(value(0, 0), value(0, 1));",
        tests="prefill int8",
    ),
    Mutant(
        "INT8 prefill: a key takes its neighbour's scale", "prefill.cuh",
        "terms.factors, 8 * n + 2 * c)", "terms.factors, 8 * n + (2 * c ^ 2))",
        tests="prefill int8",
    ),
    Mutant(
        "INT8 prefill: scales behind the sequence's end are read", "prefill.cuh",
        "const bool is_there = first_key + thread < end_key;", "const bool is_there = true;",
        tests="prefill int8",
    ),
    Mutant("INT8 prefill: values lose their scales", "prefill_scales.cuh",
           "logs[key] = log;", "logs[key] = 0.0f;"),
    Mutant("INT8 prefill: a weight's sum keeps the value's scale", "prefill_scales.cuh",
           "inverses[key] = exp2_approx(-log);", "inverses[key] = 1.0f;"),
    Mutant("INT8 prefill: a key whose value is all zeros does not count", "prefill_scales.cuh",
           "v_scale < LEAST ? LEAST : v_scale", "v_scale"),
    Mutant("INT8 prefill: every key takes the scale of its block's first", "prefill_scales.cuh",
           "kv_head * strides.head + slot * strides.slot", "kv_head * strides.head"),
    Mutant(
        "INT8, Hopper: a key takes its neighbour's scale", "prefill_consumer.cuh",
        "terms.factors, 8 * n + 2 * c)", "terms.factors, 8 * n + (2 * c ^ 2))",
        tests="hopper int8",
    ),
    Mutant(
        "INT8, Hopper: scales are overwritten while they are read", "prefill_hopper_tiles.cuh",
        "Tiles::IS_QUANTIZED ? Tiles::STAGES + 1 : 1", "1",
    ),
    Mutant(
        "INT8, Hopper: tiles are overwritten while they are read", "prefill_widening.cuh",
        "    if (waiting != NOTHING)"
        " wait(ring.empty[stage], (is_keys ? k_place.parity : v_place.parity) ^ 1);\n",
    ),
    Mutant(
        "INT8, Hopper: scales behind the sequence's end are read", "prefill_widening.cuh",
        "thread < Tiles::KEYS && key < tile.end_key", "thread < Tiles::KEYS",
    ),
    Mutant(
        "INT8, Hopper: eight keys take the block before", "prefill_widening.cuh",
        "__shfl_sync(ALL_LANES, tile.blocks, row / 8)",
        "__shfl_sync(ALL_LANES, tile.blocks, row / 16)",
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
    *(
        Mutant(f"{tests}: a row's maximum begins at zero", "softmax_state.cuh", "SumOf(-INF) {}",
               "SumOf(0.0f) {}", tests=tests)
        for tests in ("simt", "prefill", "hopper")
    ),
    Mutant("mma: a row's maximum begins at zero", "decode_mma.cuh", "NO_KEY = -1e30f",
           "NO_KEY = 0.0f"),
    Mutant("every row tile is the first", "work_list_cut.cuh", "item.first_row = i * cut.run;",
           "item.first_row = 0;"),
    Mutant("every class of row tiles has the first one's place", "work_list.cu",
           "class_begin += class_sizes[which];"),
    Mutant("a thread block does not go on to its next sequence", "work_list_cut.cuh",
           "if (i < cut.num_items - 1) item.next = -1;", "item.next = -1;"),
    Mutant(
        "the cut depends on the batch", "work_list_cut.cuh",
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

SUITE = mutation.Suite(
    package=PACKAGE / "src" / "pagetide_kernels",
    place="{}",
    files=tuple(
        TESTS / f"test_{name}.py"
        for name in (
            "quantized_cache", "contract", "contract_scores", "contract_company", "copy_blocks",
        )
    ),
    mutants=tuple(dataclasses.replace(m, tests=m.tests or KINDS[m.module]) for m in MUTANTS),
    # Without the back end there is no such test, and pytest says so.
    selections={kind: f"cuda and ({tests})" for kind, tests in SELECTIONS.items()},
    options=("-m", "not gpu"),
    environment={
        "PAGETIDE_BACKENDS": "cuda", "PAGETIDE_ISOLATED": "0", "OMP_NUM_THREADS": "1",
        "PAGETIDE_CONTRACT_CASES": None, "PAGETIDE_SHARD": None,
    },
    preload=("pytest", "numpy", "torch", "triton"),
    seconds=30.0,
)  # fmt: skip


def architecture_here() -> str:
    """What to compile for, without a CUDA context in this process, whose forks have their own."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"there is no GPU here ({error}): name the architecture: --arch 90a"
        ) from None
    number = said.strip().replace(".", "")
    return number + "a" * (number == "90")


def main() -> int:
    parser = mutation.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only replace the lines")
    parser.add_argument("--build", type=Path, metavar="DIR", help="only build, in this new folder")
    parser.add_argument("--run", type=Path, metavar="DIR", help="try what was built there")
    parser.add_argument("--arch", help="what to compile for; by default the GPU that is here")
    parser.set_defaults(jobs=8)
    options = parser.parse_args()
    mutants = mutation.chosen(SUITE, options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.build or options.run or scratch).resolve()
        if options.check:
            for mutant in mutants:
                apply_to_sources(mutant, folder / mutant.slug)
            print(f"{len(mutants)} mutants apply")
            return 0
        status = 0
        if not options.run:
            builder = Builder(folder, options.arch or architecture_here())
            status = builder.build(SUITE, mutants, {each: UNITS[each.tests] for each in mutants})
        if not options.build:
            packages = [folder / each.slug / SUITE.package.name for each in mutants]
            whole = folder / "whole" / SUITE.package.name
            status = max(status, mutation.judge(SUITE, mutants, whole, packages, options))
    return status


if __name__ == "__main__":
    sys.exit(main())
