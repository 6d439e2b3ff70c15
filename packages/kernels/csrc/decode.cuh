// Few query rows, many keys: the keys of a sequence are a fixed row of leaves, whoever walks them.
//
// The leaves. A sequence's keys are cut into leaves of equal length (`work_list.cu`), each an online softmax
// of its own; the leaves merge in order. Within a leaf, warp w of a thread block takes the tiles w, w + WARPS,
// ... and the warps' states merge in order. The cut depends on the sequence's length and the model's shape
// alone: that is exactness level 1.
//
// The walk. An item is a run of one sequence's leaves for one KV head. A small batch is cut into short runs, to
// fill the card; a large one into long runs, to save memory traffic. A thread block whose item is the whole
// sequence merges the leaves in registers and writes the output. Otherwise it leaves each leaf's state in global
// memory, and the last block to arrive merges them in the same order: one launch, the same bits.
//
// The engine says how a warp multiplies: on tensor cores (`decode_mma.cuh`) or CUDA cores (`decode_simt.cuh`).
// Each warp has a ring of tiles of its own in shared memory and fills it itself, so the main loop needs no
// barrier between warps.
#pragma once

#include "attention_launch.cuh"
#include "softmax_state.cuh"
#include "tile.cuh"

namespace pagetide {

// Shared memory that one thread block may use, by the architecture the kernel was compiled for.
__host__ __device__ constexpr int shared_budget(int arch, int head_dim) {
  if (arch < 80) return 64 * 1024;
  const bool is_large = arch >= 90 && arch < 120;  // 227 KB a multiprocessor; the others 99 KB
  if (head_dim <= 64) return is_large ? 75 * 1024 : 48 * 1024;
  if (head_dim <= 128) return is_large ? 115200 : 99 * 1024;
  return is_large ? 200 * 1024 : 99 * 1024;
}

// Zeros for the tokens that belong to no sequence, shared out among a KV head's thread blocks.
template <typename T>
__device__ void zero_tokens(const AttentionParams& p, int kv_head) {
  const int first = __ldg(p.query_start_loc + p.num_seqs);
  const int row_elements = p.group_size * p.head_dim;
  for (int token = first + blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    for (int i = threadIdx.x; i < row_elements; i += blockDim.x) {
      const int head = kv_head * p.group_size + i / p.head_dim;
      static_cast<T*>(p.out)[token * p.out_token_stride + head * p.out_head_stride + i % p.head_dim] =
          from_float<T>(0.0f);
    }
  }
}

template <class Engine>
__device__ __forceinline__ void zero_padding(const AttentionParams& p, int kv_head) {
  switch (Engine::query_dtype(p)) {
    case DType::FLOAT32: return zero_tokens<float>(p, kv_head);
    case DType::FLOAT16: return zero_tokens<Half>(p, kv_head);
    default: return zero_tokens<BFloat>(p, kv_head);
  }
}

// Where a column of a state lies in its row of shared memory: rows a multiple of 32 banks long are permuted, so
// that the lanes of a fragment, which hold the same columns of eight rows, do not meet in one bank.
template <int DIM>
__device__ __forceinline__ int state_column(int row, int column) {
  return DIM % 32 == 0 ? column ^ (row % 4 * 8) : column;
}

// A thread's share of a tile of 8 rows: one row, and every LANES-th group of four columns.
template <class Engine>
struct RowShare {
  static constexpr int LANES = Engine::WARPS * WARP / 8;
  static constexpr int GROUPS = (Engine::DIM / 4 + LANES - 1) / LANES;
  using State = SoftmaxState<4 * GROUPS>;

  const int row = threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;

  __device__ __forceinline__ int column(int group) const { return 4 * (lane + group * LANES); }

  // Reads (m, l, acc) from rows of floats, in shared memory or, past L1, in global memory.
  template <bool IS_GLOBAL>
  __device__ __forceinline__ State read(const float* m, const float* l, const float* acc) const {
    State state;
    state.m = IS_GLOBAL ? __ldcg(m) : *m;
    state.l = IS_GLOBAL ? __ldcg(l) : *l;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (column(i) >= Engine::DIM) continue;
      const int where = IS_GLOBAL ? column(i) : state_column<Engine::DIM>(row, column(i));
      const float4* at = reinterpret_cast<const float4*>(acc + where);
      const float4 x = IS_GLOBAL ? __ldcg(at) : *at;
      state.acc[4 * i] = x.x;
      state.acc[4 * i + 1] = x.y;
      state.acc[4 * i + 2] = x.z;
      state.acc[4 * i + 3] = x.w;
    }
    return state;
  }

  __device__ __forceinline__ void store(const State& state, float* m, float* l, float* acc) const {
    if (lane == 0) {
      __stcg(m, state.m);
      __stcg(l, state.l);
    }
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (column(i) >= Engine::DIM) continue;
      __stcg(reinterpret_cast<float4*>(acc + column(i)),
             make_float4(state.acc[4 * i], state.acc[4 * i + 1], state.acc[4 * i + 2], state.acc[4 * i + 3]));
    }
  }

  template <typename T>
  __device__ __forceinline__ void write_output(const State& state, const AttentionParams& p, const WorkItem& item,
                                               int kv_head, int row_in_item) const {
    const int flat = item.first_row + row_in_item;
    const int64_t token = item.first_token + flat / p.group_size;
    const int64_t head = kv_head * p.group_size + flat % p.group_size;
    T* out = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (column(i) >= p.head_dim) continue;  // a multiple of 8, so of 4
      if (p.out_aligned) {
        struct alignas(4 * sizeof(T)) Four {
          T x[4];
        } four;
#pragma unroll
        for (int j = 0; j < 4; ++j) four.x[j] = from_float<T>(state.value(4 * i + j));
        *reinterpret_cast<Four*>(out + column(i)) = four;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[column(i) + j] = from_float<T>(state.value(4 * i + j));
      }
    }
  }
};

// How an engine's thread block divides its shared memory: the warps' rings, the engine's own, the warps' states.
template <class Engine>
struct DecodeMemory {
  static constexpr int STATE_ROWS = 8;  // rows that the warps exchange at once
  static constexpr int TILE_BYTES = Engine::TILE * Engine::Layout::ROW_BYTES;
  static constexpr bool IS_QUANTIZED = sizeof(typename Engine::KV) == 1;
  static constexpr int SCALE_BYTES = IS_QUANTIZED ? Engine::TILE * 4 : 0;
  static constexpr int STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);  // K and V
  static constexpr int STATE_BYTES = STATE_ROWS * (Engine::DIM + 2) * 4;
  static constexpr int PASSES = Engine::ROWS / STATE_ROWS;
  static constexpr int TOTAL_FLOATS = Engine::TOTALS_IN_REGISTERS ? 0 : PASSES * (RowShare<Engine>::State::FLOATS);
  static constexpr int TOTAL_BYTES = TOTAL_FLOATS * Engine::WARPS * WARP * 4;
  static constexpr int OWN_BYTES = Engine::OWN_BYTES + TOTAL_BYTES;
  static constexpr int FIXED_BYTES = OWN_BYTES + Engine::WARPS * STATE_BYTES;

  __host__ __device__ static constexpr int stages(int arch) {
    if (arch < 80) return 1;
    const int fit = (shared_budget(arch, Engine::DIM) - FIXED_BYTES) / (Engine::WARPS * STAGE_BYTES);
    return fit > 4 ? 4 : fit > 1 ? fit : 1;
  }
  // With a single stage nothing is on its way when states are exchanged: they take the ring's place.
  __host__ __device__ static constexpr int ring_bytes(int arch) {
    const int bytes = stages(arch) * STAGE_BYTES;
    return stages(arch) == 1 && bytes < STATE_BYTES ? STATE_BYTES : bytes;
  }
  __host__ __device__ static constexpr int bytes(int arch) {
    return OWN_BYTES + Engine::WARPS * (ring_bytes(arch) + (stages(arch) == 1 ? 0 : STATE_BYTES));
  }
};

// A thread's totals over leaves, a pass of eight rows each: in registers, or, where an engine has none left, in
// memory of its own.
template <class Engine, int PASSES>
struct Totals {
  using State = typename RowShare<Engine>::State;
  static constexpr int THREADS = Engine::WARPS * WARP;
  State states[Engine::TOTALS_IN_REGISTERS ? PASSES : 1];
  float* const memory;

  __device__ __forceinline__ explicit Totals(unsigned char* total_smem)
      : memory(reinterpret_cast<float*>(total_smem) + threadIdx.x) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) put(pass, State{});
  }
  __device__ __forceinline__ State get(int pass) const {
    if constexpr (Engine::TOTALS_IN_REGISTERS) return states[pass];
    State state;
    const float* from = memory + pass * State::FLOATS * THREADS;
    state.m = from[0];
    state.l = from[THREADS];
#pragma unroll
    for (int i = 0; i < State::SIZE; ++i) state.acc[i] = from[(2 + i) * THREADS];
    return state;
  }
  __device__ __forceinline__ void put(int pass, const State& state) {
    if constexpr (Engine::TOTALS_IN_REGISTERS) {
      states[pass] = state;
    } else {
      float* to = memory + pass * State::FLOATS * THREADS;
      to[0] = state.m;
      to[THREADS] = state.l;
#pragma unroll
      for (int i = 0; i < State::SIZE; ++i) to[(2 + i) * THREADS] = state.acc[i];
    }
  }
};

template <class Engine>
__device__ __forceinline__ void write_rows(const typename RowShare<Engine>::State& state, const RowShare<Engine>& share,
                                           const AttentionParams& p, const WorkItem& item, int kv_head, int row) {
  if (row >= item.num_rows) return;
  switch (Engine::query_dtype(p)) {
    case DType::FLOAT32: return share.template write_output<float>(state, p, item, kv_head, row);
    case DType::FLOAT16: return share.template write_output<Half>(state, p, item, kv_head, row);
    default: return share.template write_output<BFloat>(state, p, item, kv_head, row);
  }
}

// Grid (items, num_kv_heads).
template <class Engine>
__global__ void __launch_bounds__(Engine::WARPS* WARP, Engine::MIN_BLOCKS)
    decode_kernel(const __grid_constant__ AttentionParams p) {
  using Memory = DecodeMemory<Engine>;
  using State = typename RowShare<Engine>::State;
  using KV = typename Engine::KV;
  constexpr int STAGES = Memory::stages(COMPILED_ARCH);
  constexpr int RING_BYTES = Memory::ring_bytes(COMPILED_ARCH);
  constexpr int BLOCK_KEYS = Engine::WARPS * Engine::TILE;  // one tile of every warp
  constexpr int PASSES = Memory::PASSES;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ bool is_last;

  const WorkItem item = p.items[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int warp = threadIdx.x / WARP;
  const int lane = threadIdx.x % WARP;
  unsigned char* ring = smem + Memory::OWN_BYTES + warp * RING_BYTES;
  unsigned char* states_smem = smem + Memory::OWN_BYTES + (STAGES == 1 ? 0 : Engine::WARPS * RING_BYTES);
  constexpr int STATE_PITCH = STAGES == 1 ? RING_BYTES : Memory::STATE_BYTES;  // from warp to warp

  if (item.sequence < 0) {
    zero_padding<Engine>(p, kv_head);
    return;
  }

  // Which keys: from the first that the first row sees to the last that the last row sees.
  const int offset = item.seq_len - item.query_len;  // the first query token's position
  const int first_position = offset + item.first_row / p.group_size;
  const int last_position = offset + (item.first_row + item.num_rows - 1) / p.group_size;
  const int end_key = max(0, last_position + 1);
  const int first_key = p.window > 0 ? max(0, first_position - p.window + 1) : 0;
  const int run_begin = item.first_leaf * item.leaf_keys;
  const int run_end = min(run_begin + item.num_leaves * item.leaf_keys, end_key);
  const int leaf_steps = item.leaf_keys / BLOCK_KEYS;
  // Leaves that some row sees: the others are left out of every merge.
  const int visible_leaf = first_key / item.leaf_keys;
  const int visible_end = (end_key + item.leaf_keys - 1) / item.leaf_keys;
  const int begin_step = max(run_begin, first_key) / BLOCK_KEYS;
  const int end_step = (run_end + BLOCK_KEYS - 1) / BLOCK_KEYS;

  const int32_t* table = p.block_tables + item.table_row * p.table_stride;
  const KV* k_head = static_cast<const KV*>(p.k) + kv_head * p.k_strides.head;
  const KV* v_head = static_cast<const KV*>(p.v) + kv_head * p.v_strides.head;

  const float* k_scale_head = p.k_scales + kv_head * p.k_scale_strides.head;
  const float* v_scale_head = p.v_scales + kv_head * p.v_scale_strides.head;

  // A step's tile for this warp, on its way to its stage; and which blocks the tile lies in, one step ahead,
  // so that no copy waits for its address.
  auto tile_key = [&](int step) { return step * BLOCK_KEYS + warp * Engine::TILE; };
  auto blocks_of = [&](int step) {
    return blocks_of_tile(table, tile_key(step), end_key, p.block_shift, Engine::TILE);
  };
  auto start_copy = [&](int step, int stage, int blocks) {
    unsigned char* k_tile = ring + stage * Memory::STAGE_BYTES;
    load_tile<KV, Engine::DIM, Engine::TILE, WARP>(k_tile, k_head, p.k_strides, blocks, tile_key(step), end_key,
                                                   p.block_shift, p.head_dim, p.kv_aligned, lane);
    load_tile<KV, Engine::DIM, Engine::TILE, WARP>(k_tile + Memory::TILE_BYTES, v_head, p.v_strides, blocks,
                                                   tile_key(step), end_key, p.block_shift, p.head_dim, p.kv_aligned,
                                                   lane);
    if constexpr (Memory::IS_QUANTIZED) {
      float* scales = reinterpret_cast<float*>(k_tile + 2 * Memory::TILE_BYTES);
      load_scales<Engine::TILE>(scales, k_scale_head, p.k_scale_strides, blocks, tile_key(step), end_key,
                                p.block_shift, lane);
      load_scales<Engine::TILE>(scales + Engine::TILE, v_scale_head, p.v_scale_strides, blocks, tile_key(step),
                                end_key, p.block_shift, lane - Engine::TILE);
    }
  };

  constexpr int AHEAD = STAGES - 1;  // copies on their way while one tile is computed
  int next_blocks = 0;
  {
    int first_blocks[AHEAD + 1];
#pragma unroll
    for (int i = 0; i <= AHEAD; ++i) first_blocks[i] = blocks_of(begin_step + i);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (begin_step + i < end_step) start_copy(begin_step + i, i, first_blocks[i]);
      commit_copies();  // empty groups too: the count of groups is the count of steps
    }
    next_blocks = first_blocks[AHEAD];
  }
  Engine engine(p, item, kv_head, smem);
  zero_padding<Engine>(p, kv_head);  // while the first tiles are on their way

  const RowShare<Engine> share;
  const bool is_whole = item.num_items == 1;
  const int64_t state_index = static_cast<int64_t>(item.first_state) * p.num_kv_heads + kv_head;
  Totals<Engine, PASSES> totals(smem + Engine::OWN_BYTES);

  int step = begin_step;
  int stage = 0;
  const int end_leaf = min(item.first_leaf + item.num_leaves, visible_end);
  for (int leaf = max(item.first_leaf, visible_leaf); leaf < end_leaf; ++leaf) {
    const int leaf_end = min((leaf + 1) * leaf_steps, end_step);
    for (; step < leaf_end; ++step) {
      if constexpr (STAGES == 1) {
        start_copy(step, 0, next_blocks);
        commit_copies();
        next_blocks = blocks_of(step + 1);
      }
      // This lane's part of the tile has landed; the barrier makes it all lanes' parts, and says that all have
      // read the tile of the step before, whose place the next copy takes.
      wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
      __syncwarp();
      if constexpr (STAGES > 1) {
        if (step + AHEAD < end_step) {
          start_copy(step + AHEAD, stage == 0 ? STAGES - 1 : stage - 1, next_blocks);
          next_blocks = blocks_of(step + AHEAD + 1);
        }
        commit_copies();
      }
      const unsigned char* k_tile = ring + stage * Memory::STAGE_BYTES;
      engine.attend(k_tile, k_tile + Memory::TILE_BYTES,
                    reinterpret_cast<const float*>(k_tile + 2 * Memory::TILE_BYTES), tile_key(step), first_position,
                    last_position);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      if constexpr (STAGES == 1) __syncwarp();  // all lanes have read the tile that the next copy overwrites
    }

    // The leaf ends: the warps' states become one, eight rows at a time.
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (pass * Memory::STATE_ROWS >= item.num_rows) break;
      engine.share_rows(pass, reinterpret_cast<float*>(states_smem + warp * STATE_PITCH));
      __syncthreads();  // every warp's state is in shared memory
      State state;
#pragma unroll
      for (int w = 0; w < Engine::WARPS; ++w) {
        const float* m = reinterpret_cast<const float*>(states_smem + w * STATE_PITCH);
        state.merge(share.template read<false>(m + share.row, m + Memory::STATE_ROWS + share.row,
                                               m + 2 * Memory::STATE_ROWS + share.row * Engine::DIM));
      }
      const int row = pass * Memory::STATE_ROWS + share.row;
      if (is_whole) {
        State total = totals.get(pass);
        total.merge(state);
        totals.put(pass, total);
      } else if (row < item.num_rows) {
        const int64_t at = state_index + static_cast<int64_t>(leaf) * p.num_kv_heads;
        share.store(state, p.sums + at * 2 * p.state_rows + row, p.sums + (at * 2 + 1) * p.state_rows + row,
                    p.states + (at * p.state_rows + row) * Engine::DIM);
      }
      __syncthreads();  // all have read the states that the next pass, leaf or tile overwrites
    }
    engine.reset();
  }

  if (!is_whole) {
    // Every thread's states are visible to the card before one thread announces them; the last to arrive sees
    // what all others announced.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      int32_t* arrival = p.arrivals + item.sequence * p.num_kv_heads + kv_head;
      is_last = atomicAdd(arrival, 1) == item.num_items - 1;
      if (is_last) *arrival = 0;  // the next layer counts from zero
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int row = pass * Memory::STATE_ROWS + share.row;
      if (row >= item.num_rows) continue;
      State total;
#pragma unroll 4
      for (int leaf = visible_leaf; leaf < visible_end; ++leaf) {
        const int64_t at = state_index + static_cast<int64_t>(leaf) * p.num_kv_heads;
        total.merge(share.template read<true>(p.sums + at * 2 * p.state_rows + row,
                                              p.sums + (at * 2 + 1) * p.state_rows + row,
                                              p.states + (at * p.state_rows + row) * Engine::DIM));
      }
      totals.put(pass, total);
    }
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    write_rows<Engine>(totals.get(pass), share, p, item, kv_head, pass * Memory::STATE_ROWS + share.row);
  }
}

template <class Engine>
void launch_decode_instance(const AttentionParams& params, cudaStream_t stream) {
  const int bytes = shared_bytes<decode_kernel<Engine>, DecodeMemory<Engine>::bytes>();
  const dim3 grid(params.num_items, params.num_kv_heads);
  decode_kernel<Engine><<<grid, Engine::WARPS * WARP, bytes, stream>>>(params);
  check(cudaGetLastError(), "the launch of paged attention");
}

}  // namespace pagetide
