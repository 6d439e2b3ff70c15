// The states that a thread block's warps, and a sequence's thread blocks, hand each other.
#pragma once

#include "barriers.cuh"
#include "softmax_state.cuh"

namespace pagetide {

// The token of the item's sequence that a row belongs to. Most items have one, and a division takes long.
__device__ __forceinline__ int token_of(int row, const WorkItem& item, const AttentionParams& p) {
  return item.query_len == 1 ? 0 : row / p.group_size;
}

struct Place {
  int64_t token, head;  // of q and out
};
__device__ __forceinline__ Place place_of(int row, const WorkItem& item, int kv_head, const AttentionParams& p) {
  const int token = token_of(row, item, p);
  return {item.first_token + token, kv_head * p.group_size + row - token * p.group_size};
}

// A state of ROWS rows in shared memory: (m, l) [ROWS], acc [ROWS, PITCH]. Rows are four banks apart, so that
// the lanes that hold one column of every second row do not meet in a bank, and 16 bytes stay aligned.
template <class Engine>
struct StateLayout {
  static constexpr int PITCH = Engine::DIM + 4;
  static constexpr int ACC = 2 * Engine::ROWS;
  static constexpr int FLOATS = ACC + Engine::ROWS * PITCH;
};

// A thread's share of a tile of 8 rows: one row, and every LANES-th group of four columns.
template <class Engine>
struct RowShare {
  using Layout = StateLayout<Engine>;
  static constexpr int ROWS = 8;
  static constexpr int LANES = Engine::WARPS * WARP / ROWS;
  static constexpr int GROUPS = (Engine::DIM / 4 + LANES - 1) / LANES;
  using State = SoftmaxState<4 * GROUPS, Engine::IS_NATURAL>;

  const int row = threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;

  __device__ __forceinline__ int column(int group) const { return 4 * (lane + group * LANES); }

  // A row's share of a state in shared memory.
  __device__ __forceinline__ State read(const float* state_smem, int state_row) const {
    State state;
    const float2 sum = *reinterpret_cast<const float2*>(state_smem + 2 * state_row);
    state.m = sum.x;
    state.l = sum.y;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (column(i) >= Engine::DIM) continue;
      const float* from = state_smem + Layout::ACC + state_row * Layout::PITCH + column(i);
      put_four(state, i, *reinterpret_cast<const float4*>(from));
    }
    return state;
  }

  // Sends it to where the cluster's first thread block has its state, ROW_BYTES in all, and counts them at its barrier.
  static constexpr int ROW_BYTES = 4 * (Engine::DIM + 2);
  __device__ __forceinline__ void send_to_first(const State& state, const float* state_smem, int state_row,
                                                const Barrier& complete) const {
    const uint32_t to = in_first_block(shared_address(state_smem));
    const uint32_t barrier = in_first_block(shared_address(&complete));
    if (lane == 0) send(to + 4 * (2 * state_row), make_float2(state.m, state.l), barrier);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (column(i) >= Engine::DIM) continue;
      send(to + 4 * (Layout::ACC + state_row * Layout::PITCH + column(i)), four_of(state, i), barrier);
    }
  }

  // The same in global memory, past L1, which does not see what other multiprocessors write.
  __device__ __forceinline__ State find(const float* m, const float* l, const float* acc) const {
    State state;
    state.m = __ldcg(m);
    state.l = __ldcg(l);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (column(i) >= Engine::DIM) continue;
      put_four(state, i, __ldcg(reinterpret_cast<const float4*>(acc + column(i))));
    }
    return state;
  }

  __device__ __forceinline__ void leave(const State& state, float* m, float* l, float* acc) const {
    if (lane == 0) {
      __stcg(m, state.m);
      __stcg(l, state.l);
    }
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (column(i) < Engine::DIM) __stcg(reinterpret_cast<float4*>(acc + column(i)), four_of(state, i));
    }
  }

  template <typename T>
  __device__ __forceinline__ void write_output(const State& state, const AttentionParams& p, const WorkItem& item,
                                               int kv_head, int row_in_item) const {
    const Place place = place_of(item.first_row + row_in_item, item, kv_head, p);
    T* out = static_cast<T*>(p.out) + place.token * p.out_token_stride + place.head * p.out_head_stride;
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

 private:
  __device__ static __forceinline__ void put_four(State& state, int group, float4 x) {
    state.acc[4 * group] = x.x;
    state.acc[4 * group + 1] = x.y;
    state.acc[4 * group + 2] = x.z;
    state.acc[4 * group + 3] = x.w;
  }
  __device__ static __forceinline__ float4 four_of(const State& state, int group) {
    return make_float4(state.acc[4 * group], state.acc[4 * group + 1], state.acc[4 * group + 2],
                       state.acc[4 * group + 3]);
  }
};

// A thread's share of the state over the leaves so far: in registers, or, where long rows leave none, its sums of
// values in shared memory that is this thread's alone.
template <class Engine>
class Total {
  using State = typename RowShare<Engine>::State;
  static constexpr int THREADS = Engine::WARPS * WARP;
  static constexpr bool IN_MEMORY = Engine::DIM > 128;
  State state;
  float* mine;

 public:
  static constexpr int BYTES = IN_MEMORY ? State::SIZE * THREADS * 4 : 0;

  __device__ __forceinline__ void begin(float* memory) {
    mine = memory + threadIdx.x;
    put(State{});
  }
  __device__ __forceinline__ State get() const {
    State full = state;
    if constexpr (IN_MEMORY) {
#pragma unroll
      for (int i = 0; i < State::SIZE; ++i) full.acc[i] = mine[i * THREADS];
    }
    return full;
  }
  __device__ __forceinline__ void merge(const State& later) {
    State full = get();
    full.merge(later);
    put(full);
  }

 private:
  __device__ __forceinline__ void put(const State& full) {
    state.m = full.m;
    state.l = full.l;
#pragma unroll
    for (int i = 0; i < State::SIZE; ++i) (IN_MEMORY ? mine[i * THREADS] : state.acc[i]) = full.acc[i];
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

}  // namespace pagetide
