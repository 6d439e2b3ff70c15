// A walk over keys through a ring of tiles in shared memory, which the next two rungs share.
//
// A warp's tile is half a block of the table: 8 keys, 1 KB of K and 1 KB of V, in 16-byte copies that pass by the
// registers (cp.async; plain loads below sm_80). While one tile is used, three are on their way. Eight lanes share
// a key, eight columns a lane: a dot product ends with three shuffles, and four keys go at once. Each eight lanes
// keep a softmax state of their own.
#pragma once

#include "ladder.cuh"
#include "primitives.cuh"

namespace ladder {

constexpr int TILE = 8;
constexpr int STAGES = 4;
struct Ring {
  uint4 k[STAGES][TILE * DIM / 8];
  uint4 v[STAGES][TILE * DIM / 8];
};

__device__ __forceinline__ void to_floats(uint4 x, float (&y)[8]) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[2 * i] = pagetide::to_float(pagetide::Half{static_cast<uint16_t>(words[i])});
    y[2 * i + 1] = pagetide::to_float(pagetide::Half{static_cast<uint16_t>(words[i] >> 16)});
  }
}

// The state of one head's query over keys `begin` to `end` (`begin` a multiple of 32), in the first eight lanes of
// the first warp: lane l has columns 8 l to 8 l + 7.
__device__ __forceinline__ SoftmaxState<8> walk(const Args& a, int head, int sequence, int begin, int end) {
  __shared__ Ring rings[WARPS];
  __shared__ StoredState<8> states[WARPS][8];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  Ring& ring = rings[warp];
  float q[8];
  to_floats(reinterpret_cast<const uint4*>(a.q + (int64_t{sequence} * a.num_heads + head) * DIM)[lane % 8], q);
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] *= a.scale * LOG2_E;

  auto start_copy = [&](int tile, int stage) {
    const int first = tile * TILE;
    if (first < end) {
      const int64_t at = row_of(a, sequence, kv_head, first);
      for (int chunk = lane; chunk < TILE * DIM / 8; chunk += WARP) {
        const int bytes = first + chunk / 8 < end ? 16 : 0;
        pagetide::copy_16_async(&ring.k[stage][chunk], a.k + at + chunk * 8, bytes);
        pagetide::copy_16_async(&ring.v[stage][chunk], a.v + at + chunk * 8, bytes);
      }
    }
    pagetide::commit_copies();
  };
  const int begin_tile = begin / TILE + warp;
  for (int i = 0; i < STAGES - 1; ++i) start_copy(begin_tile + i * WARPS, i);

  SoftmaxState<8> state;
  int stage = 0;
  for (int tile = begin_tile; tile * TILE < end; tile += WARPS) {
    pagetide::wait_copies<STAGES - 2>();
    __syncwarp();  // all lanes' parts have landed, and all have used the tile that the next copy overwrites
    start_copy(tile + (STAGES - 1) * WARPS, (stage + STAGES - 1) % STAGES);
#pragma unroll
    for (int four = 0; four < TILE; four += 4) {
      const int row = four + lane / 8;
      float x[8];
      to_floats(ring.k[stage][row * 8 + lane % 8], x);
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) score += q[i] * x[i];
      for (int d = 4; d > 0; d /= 2) score += __shfl_xor_sync(ALL_LANES, score, d);
      if (tile * TILE + row >= end) score = -INF;
      const float shrink = state.raise(score);
      const float weight = state.weight(score);
      state.l += weight;
      to_floats(ring.v[stage][row * 8 + lane % 8], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) state.acc[i] = state.acc[i] * shrink + weight * x[i];
    }
    stage = (stage + 1) % STAGES;
  }

  // Across the warp's four groups of lanes, then across the warps.
#pragma unroll
  for (int d = 8; d < WARP; d *= 2) {
    SoftmaxState<8> other;
    other.m = __shfl_xor_sync(ALL_LANES, state.m, d);
    other.l = __shfl_xor_sync(ALL_LANES, state.l, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) other.acc[i] = __shfl_xor_sync(ALL_LANES, state.acc[i], d);
    state.merge(other);
  }
  if (lane < 8) states[warp][lane] = state;
  __syncthreads();  // every warp's state is there
  for (int w = 1; w < WARPS && threadIdx.x < 8; ++w) state.merge(states[w][lane].read());
  return state;
}

__device__ __forceinline__ void write(const Args& a, int head, int sequence, const SoftmaxState<8>& state) {
  half2* out = reinterpret_cast<half2*>(a.out + (int64_t{sequence} * a.num_heads + head) * DIM + threadIdx.x * 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = __floats2half2_rn(state.value(2 * i), state.value(2 * i + 1));
}

}  // namespace ladder
