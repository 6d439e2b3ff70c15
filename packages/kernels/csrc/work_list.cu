// What the step's thread blocks do, made on the device from its lengths alone.
//
// The host knows bounds; only the device knows the lengths, when a captured graph is replayed. So one thread
// block, inside the graph, cuts the step into items, and the attention kernels run a fixed grid over them.
#include "launch.h"
#include "primitives.cuh"

namespace pagetide {
namespace {

constexpr int THREADS = 512;  // more leave sm_75 too few registers

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

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

// A thread's sequence and how it is cut.
struct Cut {
  WorkItem item;       // the first of them
  int num_items;
  int run;             // leaves an item; 0: items are row tiles
  int num_leaves;
};

// The items of one warp's 32 sequences, written by the whole warp: a sequence may have very many.
__device__ void write_items(const Cut& mine, int first_index, WorkItem* items, int capacity, int row_tile) {
  const int lane = threadIdx.x % WARP;
  for (int owner = 0; owner < WARP; ++owner) {
    const int num_items = __shfl_sync(ALL_LANES, mine.num_items, owner);
    if (num_items == 0) continue;
    Cut cut;
    int* words = reinterpret_cast<int*>(&cut);
    const int* my_words = reinterpret_cast<const int*>(&mine);
#pragma unroll
    for (int i = 0; i < int(sizeof(Cut) / 4); ++i) words[i] = __shfl_sync(ALL_LANES, my_words[i], owner);
    const int first = __shfl_sync(ALL_LANES, first_index, owner);
    for (int i = lane; i < num_items; i += WARP) {
      WorkItem item = cut.item;
      if (cut.run > 0) {
        item.first_leaf = i * cut.run;
        item.num_leaves = min(cut.run, cut.num_leaves - item.first_leaf);
        item.num_items = num_items;
      } else {
        item.first_row = i * row_tile;
        item.num_rows = min(row_tile, cut.item.num_rows - item.first_row);
        item.num_leaves = cut.num_leaves;
        item.num_items = 1;
      }
      if (first + i < capacity) items[first + i] = item;
    }
  }
}

__global__ void __launch_bounds__(THREADS) work_list_kernel(const __grid_constant__ WorkListParams p) {
  __shared__ int warp_sums[THREADS / WARP];

  // A sequence's path is its own: its rows fit a decode tile, or they do not.
  auto read = [&](int sequence, int& query_len, int& seq_len) {
    const bool is_there = sequence < p.num_seqs;
    query_len = is_there ? p.query_start_loc[sequence + 1] - p.query_start_loc[sequence] : 0;
    seq_len = is_there ? p.seq_lens[sequence] : 0;
    return query_len > 0 && query_len * p.group_size <= p.decode_rows;
  };

  // A run is as many leaves as it takes to give every thread block about the same number of keys, in units of the
  // shortest leaf.
  int my_units = 0;
  for (int first = 0; first < p.num_seqs; first += THREADS) {
    int query_len, seq_len;
    if (read(first + threadIdx.x, query_len, seq_len)) my_units += ceil_div(seq_len, p.min_leaf_keys);
  }
  const int64_t units = scan(my_units, warp_sums).total;
  const int units_a_block = int((units * p.num_kv_heads + p.target_blocks - 1) / p.target_blocks);

  int decode_end = 0;
  int prefill_end = 0;
  int state_end = 0;
  for (int first = 0; first < p.num_seqs; first += THREADS) {
    const int sequence = first + threadIdx.x;
    int query_len, seq_len;
    const bool decodes = read(sequence, query_len, seq_len);
    const int num_rows = query_len * p.group_size;
    const int leaf_keys = leaf_keys_of(seq_len, p);
    Cut cut{};
    cut.num_leaves = ceil_div(seq_len, leaf_keys);
    if (query_len > 0) {
      cut.item = WorkItem{sequence, p.rows[sequence], 0, num_rows, 0, 0, 1, 0, seq_len, query_len,
                          p.query_start_loc[sequence], leaf_keys};
    }
    int num_states = 0;
    if (decodes) {
      cut.run = max(1, ceil_div(units_a_block, leaf_keys / p.min_leaf_keys));
      cut.num_items = max(1, ceil_div(cut.num_leaves, cut.run));  // one even of no keys: it writes zeros
      num_states = cut.num_items > 1 ? cut.num_leaves : 0;
    }
    const Scan states = scan(num_states, warp_sums);
    const Scan decode = scan(cut.num_items, warp_sums);
    cut.item.first_state = state_end + states.before;
    write_items(cut, decode_end + decode.before, p.decode_items, p.decode_capacity, p.decode_rows);
    state_end += states.total;
    decode_end += decode.total;

    const int row_tile = p.prefill_items ? p.prefill_rows : p.decode_rows;
    cut.run = 0;
    cut.num_items = decodes ? 0 : ceil_div(num_rows, row_tile);
    const Scan prefill = scan(cut.num_items, warp_sums);
    if (p.prefill_items) {
      write_items(cut, prefill_end + prefill.before, p.prefill_items, p.prefill_capacity, row_tile);
      prefill_end += prefill.total;
    } else {
      write_items(cut, decode_end + prefill.before, p.decode_items, p.decode_capacity, row_tile);
      decode_end += prefill.total;
    }
  }
  for (int i = threadIdx.x; i < p.num_seqs * p.num_kv_heads; i += THREADS) p.arrivals[i] = 0;
  for (int i = decode_end + threadIdx.x; i < p.decode_capacity; i += THREADS) p.decode_items[i].sequence = -1;
  for (int i = prefill_end + threadIdx.x; i < p.prefill_capacity; i += THREADS) p.prefill_items[i].sequence = -1;
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
