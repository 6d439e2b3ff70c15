// How a warp's tiles of keys and values get to its ring.
#pragma once

#include "decode_walk.cuh"
#include "tile.cuh"

namespace pagetide {

// Copies a warp's tiles, one after the other through all items of its thread block: it goes on to the next item while
// the last tiles of this one are still used. The blocks that tiles lie in are looked up several steps ahead, a lane an
// eighth key (a block holds eight keys at least), so that no copy waits for its address; an item's first blocks come
// with the item.
template <class Engine>
class TileCopier {
  using KV = typename Engine::KV;
  using Layout = typename Engine::Layout;
  static constexpr int TILE = Engine::TILE;
  static constexpr int CHUNKS = Layout::CHUNKS;
  static constexpr int TILE_BYTES = TILE * Layout::ROW_BYTES;
  static constexpr int GROUPS = TILE <= 8 ? 1 : TILE / 8;  // of eight keys
  static constexpr int AHEAD = WARP / GROUPS;              // steps whose blocks the lanes hold
  static constexpr bool IS_QUANTIZED = sizeof(KV) == 1;
  // Lanes keep their column from pass to pass, and the rows of a unit lie in one block, one behind the other.
  static constexpr bool IS_REGULAR = WARP % CHUNKS == 0;
  static constexpr int PASS_ROWS = IS_REGULAR ? WARP / CHUNKS : 1;
  static constexpr int UNIT = TILE < 16 ? TILE : 16;
  static constexpr int SCALE_LANES = 2 * TILE / 4;

  const AttentionParams& p;
  const int* const item_words;  // this lane's of item 0
  const int kv_head, row_tile;
  const int lane = threadIdx.x % WARP;
  const int warp;
  const bool is_plain;  // units are rows of whole chunks, aligned, and keys and values lie alike
  // Where this lane's chunk of a tile's first row lies in block 0, in values behind keys, and in a tile.
  uint64_t k_lane;
  int64_t v_behind_k;
  uint32_t lane_smem;
  // Of INT8: the same of scales, four a lane, first those of the keys, then those of the values.
  bool has_plain_scales;
  uint64_t scale_lane;

  int words;            // the item that is being copied; its lane's word
  int next_words;
  const int32_t* table;
  int run_begin, end_key, step, end_step;
  int item_end;         // of the keys whose blocks come with the item
  int first_step;       // of those whose blocks the lanes hold
  int blocks;
  int later_blocks;     // of the steps behind them

  __device__ __forceinline__ int first_key(int of_step) const { return (of_step * Engine::WARPS + warp) * TILE; }

  __device__ __forceinline__ int look_up(int of_step) const {
    const int key = first_key(of_step + lane / GROUPS) + 8 * (lane % GROUPS);
    return key < end_key ? table[key >> p.block_shift] : 0;
  }

 public:
  // What no item decides; nothing is read yet.
  __device__ __forceinline__ TileCopier(const AttentionParams& params, const int* lane_item_words, int of_kv_head,
                                        int of_row_tile, int of_warp)
      : p(params),
        item_words(lane_item_words),
        kv_head(of_kv_head),
        row_tile(of_row_tile),
        warp(of_warp),
        is_plain(kept(uint32_t(IS_REGULAR && params.kv_plain &&
                               params.k_slot_bytes == Engine::DIM * sizeof(KV) &&
                               params.v_slot_bytes == params.k_slot_bytes &&
                               params.v_block_bytes == params.k_block_bytes && params.head_dim == Engine::DIM &&
                               int(params.slot_mask) >= UNIT - 1)) != 0) {
    auto lane_address = [&](const void* cache, const Strides& strides) {
      const KV* head = static_cast<const KV*>(cache) + kv_head * strides.head;
      return kept(reinterpret_cast<uint64_t>(head + lane / CHUNKS * strides.slot + lane % CHUNKS * Layout::CHUNK));
    };
    k_lane = lane_address(p.k, p.k_strides);
    v_behind_k = int64_t(kept(lane_address(p.v, p.v_strides) - k_lane));
    lane_smem = kept(uint32_t(Layout::offset(lane / CHUNKS, lane % CHUNKS)));
    if constexpr (IS_QUANTIZED) {
      const bool is_value = lane >= SCALE_LANES / 2;
      const Strides& strides = is_value ? p.v_scale_strides : p.k_scale_strides;
      const float* head = (is_value ? p.v_scales : p.k_scales) + kv_head * strides.head;
      scale_lane = kept(reinterpret_cast<uint64_t>(head + lane * 4 % UNIT));
      const int64_t apart = reinterpret_cast<int64_t>(p.k_scales) | reinterpret_cast<int64_t>(p.v_scales) |
                            4 * (p.k_scale_strides.head | p.v_scale_strides.head | p.k_scale_strides.block);
      has_plain_scales = kept(uint32_t(is_plain && UNIT == 16 && apart % 16 == 0 && p.k_scale_strides.slot == 1 &&
                                       p.v_scale_strides.slot == 1 && p.k_scale_strides.block < 1 << 30 &&
                                       p.v_scale_strides.block == p.k_scale_strides.block)) != 0;
    }
  }

  // Goes on with an item, its lane's word of it and what is seen of it.
  __device__ __forceinline__ void enter(int new_words, const WorkItem& item, const Walk<Engine>& walk) {
    words = new_words;
    next_words = item.next < 0 ? -1 : item_words[item.next * DECODE_ITEM_WORDS];
    table = p.block_tables + item.table_row * p.table_stride;
    run_begin = item.first_leaf << item.leaf_shift;
    end_key = walk.end_key;
    step = walk.begin_step;
    end_step = walk.end_step;
    first_step = step;
    // No more than the lanes hold, so that their lookups are never further behind than one turn.
    item_end = min(run_begin + (ITEM_BLOCKS << p.block_shift), (step + AHEAD) * Walk<Engine>::STEP_KEYS);
    blocks = look_up(step);
    later_blocks = look_up(step + AHEAD);
  }

  // Starts the copy of the next tile, if there is one.
  __device__ __forceinline__ void start_next(uint32_t stage_smem) {
    while (step >= end_step) {
      if (__shfl_sync(ALL_LANES, next_words, 0) < 0) return;  // word 0 is the sequence
      const WorkItem item = item_of(next_words);
      enter(next_words, item, Walk<Engine>(item, row_tile, p));
    }
    const int key = first_key(step);
    int tile_blocks;
    if (key + TILE <= item_end) {
      const int behind = key - run_begin + lane % GROUPS * 8;
      tile_blocks = __shfl_sync(ALL_LANES, words, ITEM_WORDS + (behind >> p.block_shift));
    } else {
      if (step - first_step >= AHEAD) {
        first_step += AHEAD;
        blocks = later_blocks;
        later_blocks = look_up(first_step + AHEAD);
      }
      tile_blocks = __shfl_sync(ALL_LANES, blocks, (step - first_step) * GROUPS + lane % GROUPS);
    }
    copy(key, stage_smem, tile_blocks);
    ++step;
  }

 private:
  // `tile_blocks`: lane l holds the block of keys 8 l to 8 l + 7 of the tile. A tile of no keys stays as it was: nobody
  // looks at it.
  __device__ __forceinline__ void copy(int key, uint32_t stage_smem, int tile_blocks) const {
    if (key >= end_key) return;
    if (is_plain && key + TILE <= end_key) {
      copy_plain<true>(key, stage_smem, tile_blocks);
    } else if (is_plain) {
      copy_plain<false>(key, stage_smem, tile_blocks);
    } else {
      const KV* k_head = static_cast<const KV*>(p.k) + kv_head * p.k_strides.head;
      const KV* v_head = static_cast<const KV*>(p.v) + kv_head * p.v_strides.head;
      // Rare where rows are regular: then the passes stay a loop.
      auto* k_smem = static_cast<unsigned char*>(at_shared_address(stage_smem));
      load_tile<KV, Engine::DIM, TILE, WARP, !IS_REGULAR>(k_smem, k_head, p.k_strides, tile_blocks, key, end_key,
                                                          p.block_shift, p.head_dim, p.kv_aligned, lane);
      load_tile<KV, Engine::DIM, TILE, WARP, !IS_REGULAR>(k_smem + TILE_BYTES, v_head, p.v_strides, tile_blocks, key,
                                                          end_key, p.block_shift, p.head_dim, p.kv_aligned, lane);
    }
    if constexpr (IS_QUANTIZED) copy_scales(key, stage_smem + 2 * TILE_BYTES, tile_blocks);
  }

  __device__ __forceinline__ void copy_scales(int key, uint32_t scales_smem, int tile_blocks) const {
    // Fewer than four at a time are had at once by asynchronous copies alone, which count bytes.
    constexpr bool IS_COUNTED = COMPILED_ARCH >= 80;
    if (has_plain_scales && (IS_COUNTED || key + TILE <= end_key)) {
      const int my_key = lane * 4 % TILE;
      const uint32_t block = __shfl_sync(ALL_LANES, tile_blocks, my_key / UNIT * UNIT / 8);
      const uint32_t slot = (key + my_key / UNIT * UNIT) & p.slot_mask;
      const uint64_t from = scale_lane + uint64_t{slot * 4} + uint64_t{block} * uint32_t(p.k_scale_strides.block * 4);
      const int bytes = IS_COUNTED ? 4 * max(0, min(4, end_key - key - my_key)) : 16;
      if (lane < SCALE_LANES) {
        copy_16_async(at_shared_address(scales_smem + lane * 16), reinterpret_cast<const void*>(from), bytes);
      }
      return;
    }
#pragma unroll 1
    for (int first = 0; first < 2 * TILE; first += WARP) {  // a lane a scale
      const int i = first + lane;
      const bool is_value = i >= TILE;
      const Strides& strides = is_value ? p.v_scale_strides : p.k_scale_strides;
      const float* head_scales = (is_value ? p.v_scales : p.k_scales) + kv_head * strides.head;
      const int row = i % TILE;
      const int64_t block = __shfl_sync(ALL_LANES, tile_blocks, row / 8);
      const int slot = (key + row) & ((1 << p.block_shift) - 1);
      const float* from = head_scales + block * strides.block + slot * strides.slot;
      const bool is_there = key + row < end_key;
      auto* to = static_cast<float*>(at_shared_address(scales_smem)) + i;
      if (i < 2 * TILE) copy_4_async(to, is_there ? from : head_scales, is_there);
    }
  }

  // Rows that lie regularly: one address for all rows of a unit but for constants. Of a tile that is not whole the rows
  // behind the sequence's end become zeros.
  template <bool IS_WHOLE>
  __device__ __forceinline__ void copy_plain(int key, uint32_t stage_smem, int tile_blocks) const {
    constexpr int FROM_ROW_BYTES = Engine::DIM * int(sizeof(KV));
    const int num_rows = end_key - key - lane / CHUNKS;  // of this lane's
    auto start = [&](uint32_t to_smem, uint64_t from, int row) {
      if constexpr (IS_WHOLE) {
        copy_16_async(to_smem, reinterpret_cast<const void*>(from));
      } else {
        copy_16_async(at_shared_address(to_smem), reinterpret_cast<const void*>(from), row < num_rows ? 16 : 0);
      }
    };
#pragma unroll
    for (int unit = 0; unit < TILE; unit += UNIT) {
      const uint32_t block = __shfl_sync(ALL_LANES, tile_blocks, unit / 8);
      const uint32_t slot = (key + unit) & p.slot_mask;
      const uint64_t k_from = k_lane + uint64_t{slot * FROM_ROW_BYTES} + uint64_t{block} * p.k_block_bytes;
      const uint64_t v_from = k_from + v_behind_k;
#pragma unroll
      for (int row = 0; row < UNIT; row += PASS_ROWS) {
        const uint32_t to =
            stage_smem + Layout::rows_further(lane_smem, row % 8) + (unit + row / 8 * 8) * Layout::ROW_BYTES;
        start(to, k_from + row * FROM_ROW_BYTES, unit + row);
        start(to + TILE_BYTES, v_from + row * FROM_ROW_BYTES, unit + row);
      }
    }
  }
};

}  // namespace pagetide
