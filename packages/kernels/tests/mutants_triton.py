"""Breaks the Triton sources on purpose, one line at a time, and checks that the tests notice.

    python packages/kernels/tests/mutants_triton.py [--jobs 2] [--only WORD] [--json FILE]

Each mutant is a copy of the package with one replacement; a quick part of the contract runs on it,
interpreted, and must fail. A survivor means that a line could be wrong without anybody noticing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import mutation
from mutation import Mutant

TESTS = Path(__file__).resolve().parent
# Quick and sharp parts of the contract, each of a second or a few; a mutant names the one that is
# about its line.
SELECTIONS = {
    "one tile": "test_queries_that",
    "strides": "test_keys_and and float32",
    "tiles": "test_tiles_and and torch.float32 and not int8",
    "half tiles": "test_tiles_and and torch.float16",
    "alone": "test_case and alone and float32x",
    "empty": "test_case and empty and float32x",
    "padded": "test_case and padded and float32x",
    "groups of eight": "test_case and float16xfloat16 and 8/1x",
    "ragged": "test_case and ragged and bfloat16x",
    "window": "test_case and float16xfloat16 and (long or prefill or chunked or mixed)",
    "long": "test_case and long and float32x",
    "half leaves": "test_long_contexts and torch.float16 and not int8",
    "leaves": "test_long_contexts and torch.float32 and not int8 and not float16",
    "int8": "test_case and float16xint8 and empty",
    "int8 heads": "test_case and float16xint8 and w4",
    "stored": "test_stores and torch.float32",
    "store": "test_stores or test_queries or test_a_padding or test_quantized_cache",
    "copy": "test_copies",
    # For a mutant that nobody has looked at yet.
    "attention": (
        "test_p1 and float16 or test_p2 or test_p4 or test_any_order or test_keys_and or"
        " test_queries or test_a_padding or test_long_contexts or test_float32 or"
        " level_1 and float32"
    ),
}

# Left out: sequences that share their states, and every token of a block writing all of it, are
# races, which programs interpreted one after the other do not show.
MUTANTS = (
    Mutant(
        "key strides of head and slot swapped",
        "backend",
        "*k_cache.stride()[:3], *v_cache.stride()[:3], *scale_strides,\n            metadata",
        "*[k_cache.stride(i) for i in (0, 2, 1)], *v_cache.stride()[:3], *scale_strides,\n"
        "            metadata",
        "one tile",
    ),
    Mutant(
        "values strided as keys",
        "backend",
        '"SAME_STRIDES": k_cache.stride() == v_cache.stride()',
        '"SAME_STRIDES": True',
        "strides",
    ),
    Mutant(
        "query heads tiled over the KV heads instead of repeated",
        "decode",
        "    head = kv_head * GROUP_SIZE + row % GROUP_SIZE\n    positions",
        "    head = row % GROUP_SIZE * NUM_KV_HEADS + kv_head\n    positions",
        "alone",
    ),
    Mutant(
        "query tokens and heads of a tile swapped",
        "prefill",
        "    query = first_query + row // GROUP_SIZE\n",
        "    query = first_query + row % TOKENS\n",
        "groups of eight",
    ),
    Mutant(
        "sum not rescaled",
        "softmax_state",
        "l = tl.fma(l, shrink, tl.sum(weights, axis=1))",
        "l = l + tl.sum(weights, axis=1)",
        "tiles",
    ),
    Mutant(
        "values not rescaled",
        "tiles",
        "shrunk = acc[i] * shrink[:, None]",
        "shrunk = acc[i]",
        "tiles",
    ),
    Mutant(
        "a state merged at its own maximum",
        "softmax_state",
        "scale = power(m_b - _finite(largest), DTYPE)",
        "scale = power(m_b - m_b, DTYPE)",
        "alone",
    ),
    Mutant(
        "a state's sum merged unscaled",
        "softmax_state",
        "l = tl.fma(l_b, scale, l)",
        "l = l + l_b",
        "ragged",
    ),
    Mutant(
        "a state without keys is NaN",
        "softmax_state",
        'return tl.where(m == float("-inf"), 0.0, m)',
        "return m",
        "one tile",
    ),
    Mutant(
        "own key not seen",
        "softmax_state",
        "keys[None, :] <= positions[:, None]",
        "keys[None, :] < positions[:, None]",
        "one tile",
    ),
    Mutant(
        "next key seen",
        "softmax_state",
        "keys[None, :] <= positions[:, None]",
        "keys[None, :] <= positions[:, None] + 1",
        "one tile",
    ),
    Mutant(
        "window one key too wide",
        "softmax_state",
        "keys[None, :] > positions[:, None] - window",
        "keys[None, :] >= positions[:, None] - window",
        "alone",
    ),
    Mutant(
        "values behind the last key not masked",
        "softmax_state",
        "IS_PAIRED, not IS_QUANTIZED)",
        "IS_PAIRED, False)",
        "one tile",
    ),
    Mutant(
        "the value behind the last key read",
        "softmax_state",
        "is_owned = keys < seq_len",
        "is_owned = keys <= seq_len",
        "alone",
    ),
    Mutant(
        "scales of values behind the last key read",
        "softmax_state",
        "tl.load(both_at, mask=is_owned[:, None], other=0.0)",
        "tl.load(both_at)",
        "int8",
    ),
    Mutant(
        "the block before the last taken for it",
        "tiles",
        "last = (seq_len - 1) // BLOCK_SIZE",
        "last = (seq_len - 1) // BLOCK_SIZE - 1",
        "one tile",
    ),
    Mutant(
        "scores of float32 taken for powers of two",
        "tiles",
        "difference = difference * LOG2_E",
        "difference = difference * 1.0",
        "one tile",
    ),
    Mutant(
        "scores not masked",
        "softmax_state",
        'scores = tl.where(is_visible, scores, float("-inf"))',
        "scores = scores",
        "one tile",
    ),
    Mutant(
        "slots counted from the tile, not the block",
        "tiles",
        "slots = (tile * TILE + lane) & (BLOCK_SIZE - 1)",
        "slots = lane & (BLOCK_SIZE - 1)",
        "tiles",
    ),
    Mutant(
        "a tile's blocks found one block late",
        "tiles",
        "entry = table + tl.minimum(first + i, last)",
        "entry = table + tl.minimum(first + i + 1, last)",
        "alone",
    ),
    Mutant(
        "a tile's second block taken for its first",
        "tiles",
        "is_here = lane // BLOCK_SIZE == i",
        "is_here = lane // BLOCK_SIZE == i + 1",
        "alone",
    ),
    Mutant(
        "padding of head_dim read into the scores",
        "tiles",
        "at[:, None] + dims[None, :], mask=dims[None, :] < HEAD_WIDTH, other=0)",
        "at[:, None] + dims[None, :])",
        "alone",
    ),
    Mutant(
        "scale applied twice under a soft cap",
        "tiles",
        "_tanh(scores * (scale / soft_cap), dtype)",
        "_tanh(scores * (scale * scale / soft_cap), dtype)",
        "alone",
    ),
    Mutant(
        "soft cap loses its small scores",
        "tiles",
        "tl.where(tl.abs(x) < 0.625, x + x * z * series, result)",
        "result",
        "empty",
    ),
    Mutant(
        "key scale left out",
        "tiles",
        "        scores = scores * k_scale[None, :]\n",
        "        scores = scores * 1.0\n",
        "int8",
    ),
    Mutant(
        "value scale left out",
        "tiles",
        "        weights = weights * v_scale[None, :]\n",
        "        weights = weights * 1.0\n",
        "int8",
    ),
    Mutant(
        "scale read from the neighbour block",
        "softmax_state",
        "k_scales) + scale_at[:, None]",
        "k_scales) + (scale_at + scale_block_stride)[:, None]",
        "test_zero_tokens",
    ),
    Mutant(
        "scales of keys taken for those of values",
        "softmax_state",
        "tl.where(is_value[None, :], v_scales, k_scales)",
        "tl.where(is_value[None, :], k_scales, k_scales)",
        "int8",
    ),
    Mutant(
        "weights of INT8 values not kept in float16's range",
        "tiles",
        "return largest + tl.log2(tl.maximum(largest_scale, 2.0**-60)) - 14.0",
        "return largest",
        "test_small_int8",
    ),
    Mutant(
        "sign of the scale lost",
        "backend",
        "q, scale = -q, -scale",
        "scale = -scale",
        "test_a_scale",
    ),
    Mutant(
        "a scale of zero makes a masked score NaN",
        "backend",
        "        scale = max(scale, _LEAST_SCALE)\n",
        "",
        "test_a_scale",
    ),
    Mutant(
        "low values of pairs without their sign",
        "tiles",
        "operand((pairs << 8) >> 8, dtype)",
        "operand(pairs & 255, dtype)",
        "int8",
    ),
    Mutant(
        "even and odd values swapped",
        "tiles",
        "tl.join(acc[0], acc[1])",
        "tl.join(acc[1], acc[0])",
        "int8",
    ),
    Mutant(
        "scale of the first head for all",
        "decode",
        "k_scale_head = k_scales + kv_head.to(tl.int64) * scale_head_stride",
        "k_scale_head = k_scales + kv_head.to(tl.int64) * 0",
        "int8 heads",
    ),
    Mutant(
        "a leaf dropped in the merge",
        "decode",
        "for base in tl.range(AT_ONCE, count, AT_ONCE):",
        "for base in tl.range(AT_ONCE, count - 1, AT_ONCE):",
        "ragged",
    ),
    Mutant(
        "leaves beyond the last merged",
        "decode",
        "state + (base + i) * stride, base + i < count",
        "state + (base + i) * stride, base + i <= count",
        "alone",
    ),
    Mutant(
        "a group's state looked for at its second leaf",
        "decode",
        "GROUP * NUM_KV_HEADS, tl.cdiv(num_leaves, GROUP)",
        "NUM_KV_HEADS, tl.cdiv(num_leaves, GROUP)",
        "leaves",
    ),
    Mutant(
        "the first program to arrive merges",
        "decode",
        "if arrived < num_items - 1:",
        "if arrived > 0:",
        "alone",
    ),
    Mutant(
        "arrivals never counted from zero again",
        "decode",
        "            tl.store(arrival, 0)  # the next layer counts from zero\n",
        "            pass\n",
        "leaves",
    ),
    Mutant(
        "leaves not parted where one program walks them all",
        "decode",
        "is_one_leaf = num_tiles <= leaf_tiles",
        "is_one_leaf = (num_tiles <= leaf_tiles) | (num_items == 1)",
        "leaves",
    ),
    Mutant(
        "a leaf begun with the state of the last",
        "decode",
        "            m, l, acc = new_state(ROWS, DIM, IS_PAIRED)\n",
        "",
        "leaves",
    ),
    Mutant(
        "a group begun with the state of the last",
        "decode",
        "                    group_m, group_l, group_parts = new_state(ROWS, DIM, False)\n"
        "                    group_acc = group_parts[0]\n",
        "",
        "leaves",
    ),
    Mutant(
        "a group's state written over the last's",
        "decode",
        "leaf_state = state + leaves * NUM_KV_HEADS",
        "leaf_state = state + first_leaf * NUM_KV_HEADS",
        "leaves",
    ),
    Mutant(
        "a leaf's state written over the last's",
        "decode",
        "leaf_state += NUM_KV_HEADS",
        "leaf_state += 0",
        "half leaves",
    ),
    Mutant(
        "last tile left out",
        "work_list",
        "tl.minimum((index + 1) * owner_run * owner_leaf_tiles, _at(num_tiles, owner))",
        "tl.minimum((index + 1) * owner_run * owner_leaf_tiles, _at(num_tiles, owner) - 1)",
        "one tile",
    ),
    Mutant(
        "decode's tiles taken without a mask",
        "decode",
        "blocks, tile, True,",
        "blocks, tile, False,",
        "one tile",
    ),
    Mutant(
        "causal offset from the top left",
        "decode",
        "positions = seq_len - query_len + row // GROUP_SIZE",
        "positions = row // GROUP_SIZE",
        "alone",
    ),
    Mutant(
        "causal offset of prefill one off",
        "prefill",
        "    positions = seq_len - query_len + query\n",
        "    positions = seq_len - query_len + query + 1\n",
        "half tiles",
    ),
    Mutant(
        "prefill's diagonal tile left out",
        "prefill",
        "end_key = tl.minimum(first_position + TOKENS, seq_len)",
        "end_key = tl.minimum(first_position + TOKENS - 1, seq_len)",
        "long",
    ),
    Mutant(
        "prefill's mask begins one tile late",
        "prefill",
        "    seen_until = (first_position + 1) // TILE\n",
        "    seen_until = (first_position + TILE) // TILE\n",
        "half tiles",
    ),
    Mutant(
        "prefill's window masks one tile too few",
        "prefill",
        "seen_from = tl.cdiv(tl.maximum(first_position + TOKENS - window, 0), TILE)",
        "seen_from = tl.maximum(first_position + TOKENS - window, 0) // TILE",
        "tiles",
    ),
    Mutant(
        "prefill's window begins one tile late",
        "prefill",
        "tl.maximum(first_position - window + 1, 0) // TILE",
        "tl.cdiv(tl.maximum(first_position - window + 1, 0), TILE)",
        "window",
    ),
    Mutant(
        "padding tokens not written",
        "decode",
        "for token in range(first + tl.program_id(1), num_tokens, tl.num_programs(1)):",
        "for token in range(first + tl.program_id(1), num_tokens - 1, tl.num_programs(1)):",
        "padded",
    ),
    Mutant(
        "a table row of the sequence's place, not its own",
        "work_list",
        "row = tl.load(rows + sequence, mask=is_there, other=0)",
        "row = sequence",
        "test_buffers",
    ),
    Mutant(
        "leaves as long as the batch makes them",
        "work_list",
        "decode.tiles_a_leaf(num_tiles, tile, leaf_growth, min_leaf_tiles)",
        "decode.tiles_a_leaf(num_tiles * 0 + tl.max(num_tiles, axis=0), tile, leaf_growth,"
        " min_leaf_tiles)",
        "leaves",
    ),
    Mutant(
        "items of a sequence start at its end",
        "work_list",
        "index = item - (_at(item_ends, owner) - owner_items)",
        "index = item - (_at(item_ends, owner) - owner_items + 1)",
        "one tile",
    ),
    Mutant(
        "tokens without keys left out",
        "work_list",
        "tl.where(decodes, tl.maximum(tl.cdiv(num_leaves, run), 1), 0)",
        "tl.cdiv(num_leaves, run)",
        "test_a_padding",
    ),
    Mutant(
        "prefill's last tokens left out",
        "work_list",
        "tl.where(decodes, 0, tl.cdiv(query_len, prefill_tokens))",
        "tl.where(decodes, 0, tl.maximum(query_len // prefill_tokens, 1))",
        "long",
    ),
    Mutant(
        "INT8 cut off instead of rounded",
        "cache_ops",
        "rounded = _round(tl.div_rn(x, divisor))",
        "rounded = tl.div_rn(x, divisor)",
        "test_a_much",
    ),
    Mutant(
        "NaN dropped by the maximum",
        "cache_ops",
        'return tl.where(is_nan, float("nan"), largest)',
        "return tl.where(is_nan, 1.0, largest)",
        "test_nan",
    ),
    Mutant(
        "value written with the key's strides",
        "cache_ops",
        "v_head_stride, vc_block_stride, vc_head_stride, vc_slot_stride,\n        scale_block",
        "k_head_stride, vc_block_stride, vc_slot_stride, vc_head_stride,\n        scale_block",
        "strides",
    ),
    Mutant(
        "padding tokens stored",
        "cache_ops",
        "    if token >= tl.load(query_start_loc + num_seqs):\n        return\n",
        "",
        "stored",
    ),
    Mutant(
        "one held token forgotten when a block is rounded again",
        "cache_ops",
        "    is_held = slot < num_held\n",
        "    is_held = slot < num_held - 1\n",
        "test_a_much",
    ),
    Mutant(
        "block begun afresh keeps its old scale",
        "cache_ops",
        "    if num_held > 0:\n",
        "    if num_held >= 0:\n",
        "test_a_block",
    ),
    Mutant(
        "slots behind the step's tokens counted into block 0",
        "cache_ops",
        "mask=ahead < num_tokens, other=-BLOCK_SIZE)",
        "mask=ahead < num_tokens, other=-1)",
        "test_what_lies",
    ),
    Mutant(
        "copies into the source's layer",
        "cache_ops",
        "destination + layer * destination_layer_stride",
        "destination + layer * source_layer_stride",
        "copy",
    ),
    Mutant(
        "all but the last word of a block copied",
        "cache_ops",
        "is_word = word < block_words",
        "is_word = word < block_words - 1",
        "copy",
    ),
    Mutant(
        "scales not copied",
        "backend",
        "            tensors.append((source.scales, destination.scales))\n",
        "            pass\n",
        "copy",
    ),
)


SUITE = mutation.Suite(
    package=TESTS.parent / "src" / "pagetide_kernels",
    place="triton/{}.py",
    files=tuple(
        TESTS / f"test_{name}.py"
        for name in (
            "copy_blocks", "quantized_cache", "contract", "contract_scores", "contract_company",
        )
    ),
    mutants=MUTANTS,
    selections=SELECTIONS,
    default="attention",
    environment={
        "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PAGETIDE_BACKENDS": "triton", "PAGETIDE_ISOLATED": "0", "PAGETIDE_SHARD": None,
        "PAGETIDE_CONTRACT_CASES": None, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    },
    preload=("pytest", "numpy", "torch", "triton", "triton.language"),
)  # fmt: skip


def main() -> int:
    options = mutation.parser((__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return mutation.judge_copies(SUITE, Path(folder), options)


if __name__ == "__main__":
    sys.exit(main())
