// How a warp's tiles of keys and values get to its ring.
#pragma once

#include "decode_state.cuh"
#include "tile.cuh"

namespace pagetide {

// An item out of the words that the lanes of a warp hold.
__device__ __forceinline__ WorkItem item_of(int words) {
  WorkItem item;
  int* fields = reinterpret_cast<int*>(&item);
#pragma unroll
  for (int i = 0; i < ITEM_WORDS; ++i) fields[i] = __shfl_sync(ALL_LANES, words, i);
  return item;
}

// What a row tile of an item sees: keys from the first that its first row sees to the last that its last row sees.
template <class Engine>
struct Walk {
  static constexpr int STEP_KEYS = Engine::WARPS * Engine::TILE;  // a step is one tile of every warp

  int first_row, num_rows;
  int first_position, last_position;
  int end_key;
  int visible_leaf, visible_end;  // leaves that some row sees: the others are left out of every merge
  int begin_step, end_step;       // of this run

  __device__ __forceinline__ Walk(const WorkItem& item, int row_tile, const AttentionParams& p) {
    first_row = item.first_row + row_tile * Engine::ROWS;
    num_rows = min(Engine::ROWS, item.num_rows - row_tile * Engine::ROWS);
    const int offset = item.seq_len - item.query_len;  // the first query token's position
    first_position = offset + token_of(first_row, item, p);
    last_position = offset + token_of(first_row + num_rows - 1, item, p);
    end_key = max(0, last_position + 1);
    const int first_key = p.window > 0 ? max(0, first_position - p.window + 1) : 0;
    visible_leaf = first_key >> item.leaf_shift;
    visible_end = (end_key + (1 << item.leaf_shift) - 1) >> item.leaf_shift;
    const int run_begin = item.first_leaf << item.leaf_shift;
    const int run_end = min(run_begin + (item.num_leaves << item.leaf_shift), end_key);
    begin_step = max(run_begin, first_key) / STEP_KEYS;
    end_step = num_rows > 0 ? (run_end + STEP_KEYS - 1) / STEP_KEYS : 0;
  }
};

// Copies a warp's tiles, one after the other through all items of its thread block: it goes on to the next item while
// the last tiles of this one are still used. The blocks that tiles lie in are looked up many steps ahead, a step's a
// lane (a block holds eight keys at least, so a tile of 16 lies in two of them at most), so that no copy waits for
// its address; those of an item's first tiles come with the item.
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
  // Lanes keep their column from pass to pass, and rows of a pass lie in one block.
  static constexpr bool IS_REGULAR = WARP % CHUNKS == 0;
  static constexpr int PASS_ROWS = IS_REGULAR ? WARP / CHUNKS : 1;
  static constexpr int GROUP_ROWS = TILE < 8 ? TILE : 8;

  const AttentionParams& p;
  const int* const item_words;  // this lane's of item 0
  const int kv_head, row_tile;
  const int lane = threadIdx.x % WARP;
  const int warp = threadIdx.x / WARP;
  const bool is_plain;  // rows are whole chunks, aligned, and 32 bits hold a stride
  // Where this lane's chunk of a tile's first row lies in block 0, and in a tile.
  uint64_t k_lane, v_lane;
  uint32_t lane_smem;

  int words;            // the item that is being copied; its lane's word
  int next_words;
  const int32_t* table;
  int run_begin, end_key, step, end_step;
  int first_step;       // of those whose blocks the lanes hold
  int blocks;
  int later_blocks;     // of the steps behind them

  __device__ __forceinline__ int first_key(int of_step) const { return (of_step * Engine::WARPS + warp) * TILE; }

  __device__ __forceinline__ int look_up(int of_step) const {
    const int key = first_key(of_step + lane / GROUPS) + 8 * (lane % GROUPS);
    return key < end_key ? __ldg(table + (key >> p.block_shift)) : 0;
  }

  __device__ __forceinline__ void enter(int new_words, const WorkItem& item, const Walk<Engine>& walk) {
    words = new_words;
    next_words = item.next < 0 ? -1 : __ldg(item_words + item.next * DECODE_ITEM_WORDS);
    table = p.block_tables + item.table_row * p.table_stride;
    run_begin = item.first_leaf << item.leaf_shift;
    end_key = walk.end_key;
    step = walk.begin_step;
    end_step = walk.end_step;
    first_step = step;
    blocks = look_up(step);
    later_blocks = look_up(step + AHEAD);
  }

 public:
  // Begins with an item, its lane's word of it and what is seen of it.
  __device__ __forceinline__ TileCopier(const AttentionParams& params, const int* lane_item_words, int of_kv_head,
                                        int of_row_tile, int first_words, const WorkItem& item,
                                        const Walk<Engine>& walk)
      : p(params),
        item_words(lane_item_words),
        kv_head(of_kv_head),
        row_tile(of_row_tile),
        is_plain(params.kv_plain && params.head_dim == Engine::DIM) {
    enter(first_words, item, walk);
    auto lane_address = [&](const void* cache, const Strides& strides) {
      const KV* head = static_cast<const KV*>(cache) + kv_head * strides.head;
      return kept(reinterpret_cast<uint64_t>(head + lane / CHUNKS * strides.slot + lane % CHUNKS * Layout::CHUNK));
    };
    k_lane = lane_address(p.k, p.k_strides);
    v_lane = lane_address(p.v, p.v_strides);
    lane_smem = kept(uint32_t(Layout::offset(lane / CHUNKS, lane % CHUNKS)));
  }

  // Starts the copy of the next tile, if there is one.
  __device__ __forceinline__ void start_next(uint32_t stage_smem) {
    while (step >= end_step) {
      if (__shfl_sync(ALL_LANES, next_words, 0) < 0) return;  // word 0 is the sequence
      const WorkItem item = item_of(next_words);
      enter(next_words, item, Walk<Engine>(item, row_tile, p));
    }
    const int behind = first_key(step) - run_begin;
    int tile_blocks;
    if (behind + TILE <= ITEM_BLOCK_KEYS) {
      tile_blocks = __shfl_sync(ALL_LANES, words, ITEM_WORDS + behind / 8 + lane % GROUPS);
    } else {
      if (step - first_step >= AHEAD) {
        first_step += AHEAD;
        blocks = later_blocks;
        later_blocks = look_up(first_step + AHEAD);
      }
      tile_blocks = __shfl_sync(ALL_LANES, blocks, (step - first_step) * GROUPS + lane % GROUPS);
    }
    copy(stage_smem, tile_blocks);
    ++step;
  }

 private:
  // `tile_blocks`: lane l holds the block of keys 8 l to 8 l + 7 of the tile.
  __device__ __forceinline__ void copy(uint32_t stage_smem, int tile_blocks) {
    const int key = first_key(step);
    if (IS_REGULAR && is_plain && key + TILE <= end_key) {
      copy_plain(key, stage_smem, tile_blocks);
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
    if constexpr (IS_QUANTIZED) {
      // A lane a scale: those of the keys, then those of the values.
      const bool is_value = lane >= TILE;
      const Strides& strides = is_value ? p.v_scale_strides : p.k_scale_strides;
      const float* head_scales = (is_value ? p.v_scales : p.k_scales) + kv_head * strides.head;
      const int row = lane % TILE;
      const int64_t block = __shfl_sync(ALL_LANES, tile_blocks, row / 8);
      const int slot = (key + row) & ((1 << p.block_shift) - 1);
      const float* from = head_scales + block * strides.block + slot * strides.slot;
      const bool is_there = key + row < end_key;
      float* to = static_cast<float*>(at_shared_address(stage_smem + 2 * TILE_BYTES)) + lane;
      if (lane < 2 * TILE) copy_4_async(to, is_there ? from : head_scales, is_there);
    }
  }

  // A whole tile of whole rows: nothing to fill with zeros, and the same addresses from pass to pass but for a
  // constant. A product of 32 bits added to an address is one instruction.
  __device__ __forceinline__ void copy_plain(int key, uint32_t stage_smem, int tile_blocks) const {
    const uint32_t k_slot_bytes = p.k_slot_bytes;
    const uint32_t v_slot_bytes = p.v_slot_bytes;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const uint32_t block = __shfl_sync(ALL_LANES, tile_blocks, group);
      const uint32_t slot = (key + 8 * group) & p.slot_mask;
      const uint64_t k_from = k_lane + uint64_t{block} * p.k_block_bytes + uint64_t{slot} * k_slot_bytes;
      const uint64_t v_from = v_lane + uint64_t{block} * p.v_block_bytes + uint64_t{slot} * v_slot_bytes;
#pragma unroll
      for (int row = 0; row < GROUP_ROWS; row += PASS_ROWS) {
        const uint32_t to = stage_smem + Layout::rows_further(lane_smem, row) + 8 * group * Layout::ROW_BYTES;
        copy_16_async(to, reinterpret_cast<const void*>(k_from + uint64_t{k_slot_bytes} * row));
        copy_16_async(to + TILE_BYTES, reinterpret_cast<const void*>(v_from + uint64_t{v_slot_bytes} * row));
      }
    }
  }
};

}  // namespace pagetide
