// What the step's thread blocks do, made on the device from its lengths alone.
//
// The host knows bounds; only the device knows the lengths, when a captured graph is replayed. So one thread
// block, inside the graph, cuts the step into items, and the attention kernels run a fixed grid over them.
#include "launch.h"
#include "primitives.cuh"

namespace pagetide {
namespace {

constexpr int THREADS = 512;  // more leave sm_75 too few registers

__device__ __forceinline__ int ceil_div(int64_t a, int64_t b) { return int((a + b - 1) / b); }

// Keys of a leaf of a sequence of `seq_len`, a power of two times `min_leaf_keys`. Every leaf ends with a merge, and
// every leaf may be another thread block's: so a few leaves, until they are long enough for the merge not to count;
// then leaves of that length, until they are too many to keep.
__device__ int leaf_keys_of(int seq_len, const WorkListParams& p) {
  int64_t keys = p.min_leaf_keys;
  while ((keys < p.long_leaf_keys && keys * p.few_leaves < seq_len) || keys * p.max_leaves < seq_len) keys *= 2;
  return int(keys);
}

// Sums over the block's threads: those before this one, and all.
struct Scan {
  int before, total;
};
__device__ Scan scan(int value, int* warp_sums) {
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
  for (int w = 0; w < THREADS / WARP; ++w) {
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
__device__ MaxScan scan_max(int value, int least, int* warp_maxima) {
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
  for (int w = 0; w < THREADS / WARP; ++w) {
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
__device__ int cut_item(const Cut& cut, int i, const Deal& deal, WorkItem& item) {
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
  for (int i = threadIdx.x; i < capacity; i += THREADS) {
    items[i] = Item{};  // a warp reads all words of an item, whatever it holds
    items_at(items, i).sequence = -1;
    items_at(items, i).num_step_tokens = num_step_tokens;
  }
}

__global__ void __launch_bounds__(THREADS) work_list_kernel(const __grid_constant__ WorkListParams p) {
  __shared__ int warp_sums[THREADS / WARP];
  __shared__ int class_sizes[Classes::NUM], class_placed[Classes::NUM];  // row tiles, and those that have a place

  // A sequence's path is its own: its rows are few enough for the decode kernel, or they are not.
  struct Sequence {
    int query_len, seq_len;
    bool decodes;
    int leaf_keys, leaf_units, num_leaves, units;
  };
  auto read = [&](int index) {
    Sequence s{};
    if (index >= p.num_seqs) return s;
    s.query_len = p.query_start_loc[index + 1] - p.query_start_loc[index];
    s.seq_len = p.seq_lens[index];
    s.decodes = s.query_len > 0 && s.query_len * p.group_size <= p.decode_rows;
    s.leaf_keys = leaf_keys_of(s.seq_len, p);
    s.leaf_units = s.leaf_keys / p.min_leaf_keys + 1;
    s.num_leaves = max(1, ceil_div(s.seq_len, s.leaf_keys));  // one even of no keys: its thread block writes zeros
    s.units = s.decodes ? 1 + ceil_div(s.seq_len, p.min_leaf_keys) + s.num_leaves : 0;
    return s;
  };

  const int num_step_tokens = p.query_start_loc[p.num_seqs];
  clear_items(p.decode_items, p.decode_capacity, num_step_tokens);
  if (p.prefill_items) clear_items(p.prefill_items, p.prefill_capacity, num_step_tokens);
  for (int i = threadIdx.x; i < p.num_arrivals; i += THREADS) p.arrivals[i] = 0;
  if (threadIdx.x < Classes::NUM) class_sizes[threadIdx.x] = class_placed[threadIdx.x] = 0;

  // An even share of everything for every thread block. If shares a sixteenth longer do without going on from one
  // sequence to the next, that is better: fewer sequences are split.
  int my_units = 0;
  int my_longest = 0;
  for (int first = 0; first < p.num_seqs; first += THREADS) {
    const Sequence s = read(first + threadIdx.x);
    my_units += s.units;
    if (!s.decodes && s.query_len > 0) my_longest = max(my_longest, s.seq_len);
  }
  Deal deal{scan(my_units, warp_sums).total, p.num_runs, 0};  // the barriers within also end the clearing
  const int run_units = max(1, int(deal.units * 17 / (16 * p.num_runs)));
  auto aligned_items = [&](const Sequence& s) {
    return s.decodes ? ceil_div(s.num_leaves, max(1, run_units / s.leaf_units)) : 0;
  };
  const bool has_classes = p.prefill_items && p.prefill_capacity > 0;
  const Classes classes{has_classes ? scan_max(my_longest, 0, warp_sums).all : 0};
  auto num_row_tiles = [&](const Sequence& s) {
    return s.decodes ? 0 : ceil_div(int64_t{s.query_len} * p.group_size, p.prefill_rows);
  };
  // A sequence's row tiles up to that class: a tile sees the keys up to its last token's.
  auto tiles_up_to = [&](const Sequence& s, int which) {
    const int tiles = num_row_tiles(s);
    const int tokens = max(0, classes.most_keys(which) - (s.seq_len - s.query_len));
    if (which == Classes::NUM - 1) return tiles;
    return int(min(int64_t{tiles}, int64_t{tokens} * p.group_size / p.prefill_rows));
  };
  int my_items = 0;
  for (int first = 0; first < p.num_seqs; first += THREADS) {
    const Sequence s = read(first + threadIdx.x);
    my_items += aligned_items(s);
    int tiles = 0;
    for (int which = 0; has_classes && which < Classes::NUM && num_row_tiles(s) > 0; ++which) {
      const int end = tiles_up_to(s, which);
      atomicAdd(&class_sizes[which], end - tiles);
      tiles = end;
    }
  }
  if (scan(my_items, warp_sums).total <= p.num_runs) deal.aligned_run = run_units;

  int num_decoding = 0;
  int item_end = 0;
  int prefill_end = 0;
  int state_end = 0;
  int unit_end = 0;
  int last_run = -1;
  for (int first = 0; first < p.num_seqs; first += THREADS) {
    const int index = first + threadIdx.x;
    const Sequence s = read(index);
    const Scan decoding = scan(s.decodes, warp_sums);
    const Scan units = scan(s.units, warp_sums);
    Cut cut{};
    cut.num_leaves = s.num_leaves;
    cut.leaf_units = s.leaf_units;
    cut.begin_unit = unit_end + units.before;
    if (s.query_len > 0) {
      cut.item.sequence = index;
      cut.item.table_row = p.rows[index];
      cut.item.num_rows = s.query_len * p.group_size;
      cut.item.seq_len = s.seq_len;
      cut.item.query_len = s.query_len;
      cut.item.first_token = p.query_start_loc[index];
      cut.item.leaf_shift = __ffs(s.leaf_keys) - 1;
      cut.item.num_step_tokens = num_step_tokens;
      cut.item.next = -1;
    }
    int my_last_run = -1;
    if (s.decodes && p.cluster_size > 1) {
      cut.cutting = Cutting::EVEN_RUNS;
      cut.run = ceil_div(s.num_leaves, p.cluster_size);
      cut.first_slot = index * p.cluster_size;
      cut.num_items = ceil_div(s.num_leaves, cut.run);
    } else if (s.decodes && deal.aligned_run > 0) {
      cut.cutting = Cutting::EVEN_RUNS;
      cut.run = max(1, deal.aligned_run / s.leaf_units);
      cut.num_items = ceil_div(s.num_leaves, cut.run);
    } else if (s.decodes) {
      cut.first_run = deal.run_of(cut.begin_unit);
      my_last_run = deal.run_of(cut.begin_unit + int64_t{s.num_leaves - 1} * s.leaf_units);
      const bool fits_shares = deal.units >= int64_t{s.leaf_units} * p.num_runs;  // every share has a leaf's begin
      cut.cutting = fits_shares ? Cutting::SHARES : Cutting::LEAVES;
      cut.num_items = fits_shares ? my_last_run - cut.first_run + 1 : s.num_leaves;
      cut.item.next = p.num_runs + num_decoding + decoding.before + 1;
    }
    const Scan items = scan(cut.num_items, warp_sums);
    const MaxScan runs = scan_max(my_last_run, last_run, warp_sums);
    if (cut.cutting == Cutting::SHARES || cut.cutting == Cutting::LEAVES) {
      // The thread block that walks the sequence before may come here next.
      cut.first_slot = runs.before == cut.first_run ? p.num_runs + num_decoding + decoding.before : cut.first_run;
    } else if (p.cluster_size == 1) {
      cut.first_slot = item_end + items.before;
    }
    const Scan states = scan(cut.num_items > 1 && p.cluster_size == 1 ? s.num_leaves : 0, warp_sums);
    cut.item.first_state = state_end + states.before;
    cut.end_item = cut.num_items;
    write_items(cut, deal, p.decode_items, p.decode_capacity);
    num_decoding += decoding.total;
    unit_end += units.total;
    item_end += items.total;
    state_end += states.total;
    last_run = runs.all;

    // The others' row tiles, for the prefill kernel, or for the decode kernel behind its other items.
    cut.cutting = Cutting::ROW_TILES;
    cut.run = p.prefill_rows;
    cut.num_items = num_row_tiles(s);
    cut.item.next = -1;
    if (!p.prefill_items) {
      const Scan prefill = scan(cut.num_items, warp_sums);
      cut.first_slot = prefill_end + prefill.before + p.num_runs + p.num_seqs + 1;
      cut.end_item = cut.num_items;
      write_items(cut, deal, p.decode_items, p.decode_capacity);
      prefill_end += prefill.total;
    }
    int class_begin = 0;
    cut.end_item = 0;
    for (int which = 0; has_classes && which < Classes::NUM; ++which) {
      cut.begin_item = cut.end_item;
      cut.end_item = tiles_up_to(s, which);
      const int size = cut.end_item - cut.begin_item;
      if (size > 0) cut.first_slot = class_begin + atomicAdd(&class_placed[which], size) - cut.begin_item;
      write_items(cut, deal, p.prefill_items, p.prefill_capacity);
      class_begin += class_sizes[which];
    }
  }

  __syncthreads();  // all items are written
#pragma unroll 4
  for (int i = threadIdx.x; i < p.decode_capacity * 16; i += THREADS) {
    const WorkItem& item = p.decode_items[i / 16].item;
    const int key = (item.first_leaf << item.leaf_shift) + (i % 16 << p.block_shift);
    if (item.sequence < 0 || key >= item.seq_len) continue;
    p.decode_items[i / 16].first_blocks[i % 16] =
        p.block_tables[item.table_row * p.table_stride + (key >> p.block_shift)];
  }
}

}  // namespace

int compiled_architecture() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, work_list_kernel), "no code for this device in the compiled library");
  return attributes.ptxVersion;
}

void make_work_list(const WorkListParams& params, cudaStream_t stream) {
  work_list_kernel<<<1, THREADS, 0, stream>>>(params);
  check(cudaGetLastError(), "the work list's launch");
}

}  // namespace pagetide
