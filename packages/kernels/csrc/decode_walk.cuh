// What a thread block of the decode kernel works on: an item, and what a row tile of it sees.
#pragma once

#include <cstddef>

#include "decode_state.cuh"

namespace pagetide {

// An item out of the words that the lanes of a warp hold.
__device__ __forceinline__ WorkItem item_of(int words) {
  WorkItem item;
  int* fields = reinterpret_cast<int*>(&item);
#pragma unroll
  for (int i = 0; i < ITEM_WORDS; ++i) fields[i] = __shfl_sync(ALL_LANES, words, i);
  return item;
}

// Of such an item only what the places of a row tile's rows depend on.
template <class Engine>
__device__ __forceinline__ WorkItem rows_of(int words, int row_tile) {
  WorkItem item;
  auto word = [&](size_t offset) { return __shfl_sync(ALL_LANES, words, int(offset / 4)); };
  item.first_token = word(offsetof(WorkItem, first_token));
  item.query_len = word(offsetof(WorkItem, query_len));
  item.first_row = word(offsetof(WorkItem, first_row)) + row_tile * Engine::ROWS;
  item.num_rows = word(offsetof(WorkItem, num_rows)) - row_tile * Engine::ROWS;
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
  int plain_begin, plain_last;    // keys that a plain tile may begin with

  // The item's rows become those of the row tile.
  __device__ __forceinline__ void narrow(WorkItem& item) const {
    item.first_row = first_row;
    item.num_rows = num_rows;
  }

  // Whether every row sees every key of a tile, and no score is capped.
  __device__ __forceinline__ bool is_plain(int first_key) const {
    return first_key >= plain_begin && first_key <= plain_last;
  }

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
    plain_begin = p.window > 0 ? last_position - p.window + 1 : 0;
    plain_last = p.soft_cap > 0.0f ? -1 : first_position - (Engine::TILE - 1);
  }
};

}  // namespace pagetide
