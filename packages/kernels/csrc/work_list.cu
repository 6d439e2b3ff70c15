// What the step's thread blocks do, made on the device from its lengths alone.
//
// The host knows bounds; only the device knows the lengths, when a captured graph is replayed. So one thread
// block, inside the graph, cuts the step into items, and the attention kernels run a fixed grid over them.
#include "work_list_cut.cuh"

namespace pagetide {
namespace {

constexpr int THREADS = WORK_LIST_THREADS;

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
