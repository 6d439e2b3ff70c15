// Few query rows, many keys: the keys of a sequence are a fixed row of leaves, whoever walks them.
//
// The leaves. A sequence's keys are cut into leaves of equal length (`work_list_cut.cuh`), each an online softmax
// of its own; the leaves merge in order. Within a leaf, warp w of a thread block takes the tiles w, w + WARPS,
// ... and the warps' states merge in order. The cut depends on the sequence's length and the model's shape
// alone: that is exactness level 1.
//
// The walk. An item is a run of one sequence's leaves; a thread block walks one item, or several in a row, for one
// row tile of one KV head. Where its item is a whole sequence it merges the leaves in registers and writes the
// output. Otherwise several blocks have a part, and one of them merges what all left, in the same order: the first
// block of a cluster, to whose shared memory the others send theirs, or, without clusters, the last block to arrive,
// out of global memory. One launch, the same bits.
//
// The engine says how a warp multiplies: on tensor cores (`decode_mma.cuh`) or CUDA cores (`decode_simt.cuh`).
// Each warp has a ring of tiles of its own in shared memory and fills it itself, and the warps' states of a leaf
// are merged when the next leaf ends: no warp of the main loop waits for another.
#pragma once

#include <cstddef>

#include "decode_copy.cuh"
#include "decode_memory.cuh"

namespace pagetide {

// Zeros for the tokens that belong to no sequence, shared out among a KV head's thread blocks.
template <typename T>
__device__ void zero_tokens(const AttentionParams& p, int kv_head, int first, int step) {
  const int row_elements = p.group_size * p.head_dim;
  for (int token = first; token < p.num_tokens; token += step) {
    for (int i = threadIdx.x; i < row_elements; i += blockDim.x) {
      const int head = kv_head * p.group_size + i / p.head_dim;
      static_cast<T*>(p.out)[token * p.out_token_stride + head * p.out_head_stride + i % p.head_dim] =
          from_float<T>(0.0f);
    }
  }
}

template <class Engine>
__device__ __forceinline__ void zero_padding(const AttentionParams& p, int kv_head, int first, int step) {
  if (first >= p.num_tokens) return;
  switch (Engine::query_dtype(p)) {
    case DType::FLOAT32: return zero_tokens<float>(p, kv_head, first, step);
    case DType::FLOAT16: return zero_tokens<Half>(p, kv_head, first, step);
    default: return zero_tokens<BFloat>(p, kv_head, first, step);
  }
}

// Grid (thread blocks of a KV head's row tile, KV heads, row tiles).
template <class Engine>
__global__ void __launch_bounds__(Engine::WARPS* WARP, COMPILED_ARCH < 80 ? 1 : Engine::MIN_BLOCKS)
    decode_kernel(const __grid_constant__ AttentionParams p) {
  using Memory = DecodeMemory<Engine>;
  using Share = RowShare<Engine>;
  using State = typename Share::State;
  constexpr int STAGES = Memory::stages(COMPILED_ARCH);
  constexpr int BUFFERS = Memory::buffers(COMPILED_ARCH);
  constexpr bool IS_ASYNC = Memory::is_async(COMPILED_ARCH);
  constexpr int PASSES = Engine::ROWS / Share::ROWS;
  constexpr int STATE_FLOATS = StateLayout<Engine>::FLOATS;
  constexpr int STEP_KEYS = Walk<Engine>::STEP_KEYS;
  extern __shared__ __align__(128) unsigned char smem[];
  DecodeMeeting& meeting = *reinterpret_cast<DecodeMeeting*>(smem + Memory::meeting_at(COMPILED_ARCH));

  // Thread blocks of a cluster are neighbours.
  const int run = blockIdx.x;
  const int kv_head = blockIdx.y;
  const int row_tile = blockIdx.z;
  const int heads = p.num_kv_heads * p.row_tiles;
  const int head = kv_head * p.row_tiles + row_tile;
  const int warp = kept(threadIdx.x / WARP);

  if (threadIdx.x == 0) {
    if (BUFFERS == 2) init_barrier(meeting.finished, Engine::WARPS * WARP_ARRIVALS);
    init_barrier(meeting.sent, 1);
    if (p.cluster_size > 1) show_barriers();
  }
  __syncthreads();  // the barriers are there
  if (p.cluster_size > 1) cluster_arrive();
  const int* item_words = reinterpret_cast<const int*>(p.decode_items) + threadIdx.x % WARP;
  TileCopier<Engine> copier(p, item_words, kv_head, row_tile, warp);
  Engine engine(p, smem);
  wait_for_launch_before();
  allow_next_launch();
  int words = item_words[(run < p.num_runs ? run : run + p.num_seqs + 1) * DECODE_ITEM_WORDS];

  float* total_smem = reinterpret_cast<float*>(smem + Engine::OWN_BYTES);
  unsigned char* tiles_smem = smem + Memory::FIXED_BYTES;
  float* states_smem = reinterpret_cast<float*>(tiles_smem + (IS_ASYNC ? STAGES * Memory::STEP_BYTES : 0));
  const uint32_t ring = kept(shared_address(tiles_smem) + warp * (STAGES * Memory::STAGE_BYTES));
  const uint32_t ring_end = ring + STAGES * Memory::STAGE_BYTES;
  float* leaves_smem = reinterpret_cast<float*>(&meeting + 1);  // only in a cluster; from leaf 1 on
  int num_leaves = 0;     // that this warp has finished
  int num_announced = 0;  // of them

  if (__shfl_sync(ALL_LANES, words, 0) < 0) {
    const int first_padding = __shfl_sync(ALL_LANES, words, offsetof(WorkItem, num_step_tokens) / 4);
    if (row_tile == 0) zero_padding<Engine>(p, kv_head, first_padding + run, p.num_items);
    return;
  }

  // The first tiles set off. Every step ends a group of copies, empty or not: the count of groups is that of steps.
  WorkItem item = item_of(words);
  Walk<Engine> walk(item, row_tile, p);
  walk.narrow(item);
  copier.enter(words, item, walk);
  engine.load(item, kv_head);
  uint32_t tile = ring;
#pragma unroll 1
  for (int i = 0; IS_ASYNC && i < STAGES; ++i) {
    copier.start_next(ring + i * Memory::STAGE_BYTES);
    commit_copies();
  }

  const Share share;
  if (p.cluster_size > 1) cluster_wait();  // the first block runs, and counts what is sent to it
  for (;;) {
    words = item.next < 0 ? -1 : item_words[item.next * DECODE_ITEM_WORDS];
    const bool is_whole = item.num_items == 1;
    const bool is_clustered = !is_whole && p.cluster_size > 1;
    bool has_total = is_whole || (is_clustered && (blockIdx.x & (p.cluster_size - 1)) == 0);
    engine.begin(item, kv_head);

    Total<Engine> totals[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) totals[pass].begin(total_smem);
    const int64_t state_index = static_cast<int64_t>(item.first_state) * heads + head;
    // The warps' states of a leaf become one, eight rows at a time, and then part of the total or a thing to leave.
    auto merge_warps = [&](int leaf, int buffer) {
      const float* states = states_smem + buffer * (Engine::WARPS * STATE_FLOATS);
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const int row = pass * Share::ROWS + share.row;
        if (row >= item.num_rows) continue;
        State state;
#pragma unroll
        for (int w = 0; w < Engine::WARPS; ++w) state.merge(share.read(states + w * STATE_FLOATS, row));
        if (has_total) {
          totals[pass].merge(state);
        } else if (is_clustered) {
          share.send_to_first(state, leaves_smem + (leaf - 1) * STATE_FLOATS, row, meeting.sent);
        } else {
          const int64_t at = state_index + static_cast<int64_t>(leaf) * heads;
          share.leave(state, p.sums + at * 2 * p.state_rows + row, p.sums + (at * 2 + 1) * p.state_rows + row,
                      p.states + (at * p.state_rows + row) * Engine::DIM);
        }
      }
    };

    int step = walk.begin_step;
    const int leaf_steps = (1 << item.leaf_shift) / STEP_KEYS;
    const int begin_leaf = max(item.first_leaf, walk.visible_leaf);
    const int end_leaf = item.num_rows > 0 ? min(item.first_leaf + item.num_leaves, walk.visible_end) : 0;
    for (int leaf = begin_leaf; leaf < end_leaf; ++leaf) {
      const int leaf_end = min((leaf + 1) * leaf_steps, walk.end_step);
      for (; step < leaf_end; ++step) {
        if (!IS_ASYNC) copier.start_next(tile);
        wait_copies<STAGES - 1>();
        __syncwarp();  // not only this lane's part of the tile has landed
        const int first_key = step * STEP_KEYS + warp * Engine::TILE;
        if (first_key < walk.end_key) engine.attend(tile, first_key, walk.is_plain(first_key));
        __syncwarp();  // all lanes have read the tile whose place another takes
        if (IS_ASYNC) copier.start_next(tile);
        commit_copies();
        tile = tile + Memory::STAGE_BYTES == ring_end ? ring : tile + Memory::STAGE_BYTES;
      }

      // The leaf ends. With two buffers the warps' states of the leaf before are merged now: whoever announced that
      // leaf has also merged the one before it, so this leaf's buffer is free. Behind the last leaf all meet.
      if constexpr (BUFFERS == 2) {
        if (leaf > begin_leaf) {
          wait(meeting.finished, (num_announced - 1u) % 2);
          merge_warps(leaf - 1, (num_leaves - 1) % 2);
        }
        engine.share_state(states_smem + (num_leaves % 2 * Engine::WARPS + warp) * STATE_FLOATS);
        ++num_leaves;
        if (leaf + 1 < end_leaf) {
          arrive_as_warp(meeting.finished);
          ++num_announced;
        } else {
          __syncthreads();  // every warp's state of the last leaf is in shared memory
          merge_warps(leaf, (num_leaves - 1) % 2);
        }
      } else {
        if (!IS_ASYNC) __syncthreads();  // all have read the tiles whose place the states take
        engine.share_state(states_smem + warp * STATE_FLOATS);
        __syncthreads();  // every warp's state is in shared memory
        merge_warps(leaf, 0);
        __syncthreads();  // all have read the states that the next leaf's overwrite
      }
      engine.reset();
    }

    const bool has_next = __shfl_sync(ALL_LANES, words, 0) >= 0;
    if (has_next) engine.load(rows_of<Engine>(words, row_tile), kv_head);  // while this item's states meet
    if (is_clustered) {
      if (has_total) {
        const int begin = max(walk.visible_leaf, item.num_leaves);  // behind its own
        const int num_states = max(0, walk.visible_end - begin) * max(0, item.num_rows);
        if (threadIdx.x == 0) arrive_expecting(meeting.sent, num_states * Share::ROW_BYTES);
        wait(meeting.sent, 0);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          const int row = pass * Share::ROWS + share.row;
          if (row >= item.num_rows) continue;
#pragma unroll 4
          for (int leaf = begin; leaf < walk.visible_end; ++leaf) {
            totals[pass].merge(share.read(leaves_smem + (leaf - 1) * STATE_FLOATS, row));
          }
        }
      }
    } else if (!is_whole && item.num_rows > 0) {
      __syncthreads();  // every thread has left its states before one announces them
      if (threadIdx.x == 0) {
        int32_t* arrival = p.arrivals + item.sequence * heads + head;
        meeting.is_last = count_arrival(arrival) == item.num_items - 1;
        if (meeting.is_last) *arrival = 0;  // the next layer counts from zero
      }
      __syncthreads();  // the last to arrive sees what all others announced
      has_total = meeting.is_last;
      if (has_total) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
          const int row = pass * Share::ROWS + share.row;
          if (row >= item.num_rows) continue;
#pragma unroll 8
          for (int leaf = walk.visible_leaf; leaf < walk.visible_end; ++leaf) {
            const int64_t at = state_index + static_cast<int64_t>(leaf) * heads;
            totals[pass].merge(share.find(p.sums + at * 2 * p.state_rows + row,
                                          p.sums + (at * 2 + 1) * p.state_rows + row,
                                          p.states + (at * p.state_rows + row) * Engine::DIM));
          }
        }
      }
    }
    if (has_total) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        write_rows<Engine>(totals[pass].get(), share, p, item, kv_head, pass * Share::ROWS + share.row);
      }
    }
    if (!has_next) {
      if (row_tile == 0) zero_padding<Engine>(p, kv_head, item.num_step_tokens + run, p.num_items);
      return;
    }
    item = item_of(words);
    walk = Walk<Engine>(item, row_tile, p);
    walk.narrow(item);
  }
}

}  // namespace pagetide
