// How the work list is cut: into leaves, shares and row tiles, and items written for them.
#pragma once

#include "launch.h"
#include "primitives.cuh"

namespace pagetide {

constexpr int WORK_LIST_THREADS = 512;  // more leave sm_75 too few registers

__device__ __forceinline__ int ceil_div(int64_t a, int64_t b) { return int((a + b - 1) / b); }

// Keys of a leaf of a sequence of `seq_len`, a power of two times `min_leaf_keys`. Every leaf ends with a merge, and
// every leaf may be another thread block's: so a few leaves, until they are long enough for the merge not to count;
// then leaves of that length, until they are too many to keep.
__device__ inline int leaf_keys_of(int seq_len, const WorkListParams& p) {
  int64_t keys = p.min_leaf_keys;
  while ((keys < p.long_leaf_keys && keys * p.few_leaves < seq_len) || keys * p.max_leaves < seq_len) keys *= 2;
  return int(keys);
}

// Sums over the block's threads: those before this one, and all.
struct Scan {
  int before, total;
};
__device__ inline Scan scan(int value, int* warp_sums) {
  const int lane = threadIdx.x % WARP;
  const int warp = threadIdx.x / WARP;
  int sum = value;
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int left = __shfl_up_sync(ALL_LANES, sum, distance);
    if (lane >= distance) sum += left;
  }
  if (lane == WARP - 1) warp_sums[warp] = sum;
  __syncthreads();  // every warp's sum is there
  int before = sum - value;
  int total = 0;
  for (int w = 0; w < WORK_LIST_THREADS / WARP; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  __syncthreads();  // all have read the sums that the next scan overwrites
  return {before, total};
}

// The largest of the threads before this one and `least`, and of all.
struct MaxScan {
  int before, all;
};
__device__ inline MaxScan scan_max(int value, int least, int* warp_maxima) {
  const int lane = threadIdx.x % WARP;
  const int warp = threadIdx.x / WARP;
  int most = value;
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int left = __shfl_up_sync(ALL_LANES, most, distance);
    if (lane >= distance) most = max(most, left);
  }
  if (lane == WARP - 1) warp_maxima[warp] = most;
  int before = __shfl_up_sync(ALL_LANES, most, 1);
  if (lane == 0) before = least;
  __syncthreads();  // every warp's maximum is there
  int all = least;
  for (int w = 0; w < WORK_LIST_THREADS / WARP; ++w) {
    if (w < warp) before = max(before, warp_maxima[w]);
    all = max(all, warp_maxima[w]);
  }
  __syncthreads();  // all have read the maxima that the next scan overwrites
  return {max(before, least), all};
}

// How the keys of the step are dealt to the thread blocks of a KV head, in units of the shortest leaf. The end of any
// leaf takes as long, and so does setting out with a sequence.
struct Deal {
  int64_t units;     // of all sequences
  int num_runs;      // thread blocks
  int aligned_run;   // units of a block if every block has a part of one sequence only; 0: they may go on

  // The thread block in whose even share a unit lies, and where a share begins.
  __device__ int run_of(int64_t unit) const { return int(unit * num_runs / units); }
  __device__ int64_t begin_of(int run) const { return (run * units + num_runs - 1) / num_runs; }
};

// The row tiles of prefilling sequences, in classes by the keys that they see. The prefill kernel begins with the last
// item, so the longest come first and all multiprocessors end together; within a class sequence by sequence, for the
// tiles of one read the same keys.
struct Classes {
  static constexpr int NUM = 8;
  int longest;  // keys of any tile, at most

  __device__ int most_keys(int which) const { return int(int64_t{longest} * (which + 1) / NUM); }
};

enum class Cutting : int { ROW_TILES, EVEN_RUNS, SHARES, LEAVES };

// A thread's sequence and how it is cut.
struct Cut {
  WorkItem item;     // what its items have in common
  Cutting cutting;
  int num_items;
  int begin_item, end_item;  // of those that are written now
  int first_slot;            // of item 0
  int run;           // EVEN_RUNS: leaves an item; ROW_TILES: rows
  int num_leaves;
  int leaf_units;    // of a leaf and its end
  int begin_unit;
  int first_run;     // SHARES: whose share the sequence begins in
};

// Item `i` of a sequence, and where it goes.
__device__ inline int cut_item(const Cut& cut, int i, const Deal& deal, WorkItem& item) {
  item = cut.item;
  int slot = cut.first_slot + i;
  int end_leaf = cut.num_leaves;
  switch (cut.cutting) {
    case Cutting::ROW_TILES:
      item.first_row = i * cut.run;
      item.num_rows = min(cut.run, cut.item.num_rows - item.first_row);
      item.num_leaves = cut.num_leaves;
      item.num_items = 1;
      return slot;
    case Cutting::EVEN_RUNS:
      item.first_leaf = i * cut.run;
      end_leaf = min(item.first_leaf + cut.run, cut.num_leaves);
      break;
    case Cutting::SHARES: {
      auto leaf_of = [&](int run) { return ceil_div(deal.begin_of(run) - cut.begin_unit, cut.leaf_units); };
      if (i > 0) {
        item.first_leaf = leaf_of(cut.first_run + i);
        slot = cut.first_run + i;
      }
      if (i < cut.num_items - 1) end_leaf = leaf_of(cut.first_run + i + 1);
      break;
    }
    case Cutting::LEAVES:
      item.first_leaf = i;
      if (i > 0) slot = deal.run_of(cut.begin_unit + int64_t{i} * cut.leaf_units);
      end_leaf = i + 1;
  }
  item.num_leaves = end_leaf - item.first_leaf;
  item.num_items = cut.num_items;
  if (i < cut.num_items - 1) item.next = -1;  // the sequence goes on where another thread block begins
  return slot;
}

__device__ __forceinline__ WorkItem& items_at(WorkItem* items, int i) { return items[i]; }
__device__ __forceinline__ WorkItem& items_at(DecodeItem* items, int i) { return items[i].item; }

// The items of one warp's 32 sequences, written by the whole warp: a sequence may have very many.
template <class Item>
__device__ void write_items(const Cut& mine, const Deal& deal, Item* items, int capacity) {
  const int lane = threadIdx.x % WARP;
  for (unsigned owners = __ballot_sync(ALL_LANES, mine.begin_item < mine.end_item); owners; owners &= owners - 1) {
    const int owner = __ffs(owners) - 1;
    Cut cut;
    int* words = reinterpret_cast<int*>(&cut);
    const int* my_words = reinterpret_cast<const int*>(&mine);
#pragma unroll
    for (int i = 0; i < int(sizeof(Cut) / 4); ++i) words[i] = __shfl_sync(ALL_LANES, my_words[i], owner);
    for (int i = cut.begin_item + lane; i < cut.end_item; i += WARP) {
      WorkItem item;
      const int slot = cut_item(cut, i, deal, item);
      if (slot < capacity) items_at(items, slot) = item;
    }
  }
}

template <class Item>
__device__ void clear_items(Item* items, int capacity, int num_step_tokens) {
  for (int i = threadIdx.x; i < capacity; i += WORK_LIST_THREADS) {
    items[i] = Item{};  // a warp reads all words of an item, whatever it holds
    items_at(items, i).sequence = -1;
    items_at(items, i).num_step_tokens = num_step_tokens;
  }
}

}  // namespace pagetide
