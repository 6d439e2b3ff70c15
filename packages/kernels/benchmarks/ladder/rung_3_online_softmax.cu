// Rung 3: a warp a key, two elements a lane (half2): a row is one load of 128 bytes, and a dot product five
// shuffles. The softmax is online, in one pass: no scores in shared memory, any length. The four warps' states
// become one at the end.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int KEYS = 4;  // at once, so that their loads and shuffles overlap

__global__ void kernel(Args a) {
  __shared__ StoredState<2> states[WARPS][WARP];
  const int head = blockIdx.x, sequence = blockIdx.y;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  const int num_keys = a.seq_lens[sequence];
  const int64_t row = (int64_t{sequence} * a.num_heads + head) * DIM;
  const float2 q = __half22float2(reinterpret_cast<const half2*>(a.q + row)[lane]);
  const float factor = a.scale * LOG2_E;

  SoftmaxState<2> state;
  for (int first = warp * KEYS; first < num_keys; first += WARPS * KEYS) {
    float scores[KEYS];
    float2 values[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const int64_t at = row_of(a, sequence, kv_head, min(first + i, num_keys - 1));
      const float2 k = __half22float2(reinterpret_cast<const half2*>(a.k + at)[lane]);
      values[i] = __half22float2(reinterpret_cast<const half2*>(a.v + at)[lane]);
      scores[i] = q.x * k.x + q.y * k.y;
    }
    float largest = -INF;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      for (int d = WARP / 2; d > 0; d /= 2) scores[i] += __shfl_xor_sync(ALL_LANES, scores[i], d);
      scores[i] = first + i < num_keys ? scores[i] * factor : -INF;
      largest = fmaxf(largest, scores[i]);
    }
    const float shrink = state.raise(largest);
    state.acc[0] *= shrink, state.acc[1] *= shrink;
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const float weight = state.weight(scores[i]);
      state.l += weight;
      state.acc[0] += weight * values[i].x, state.acc[1] += weight * values[i].y;
    }
  }
  states[warp][lane] = state;
  __syncthreads();  // every warp's state is there
  if (warp > 0) return;
  for (int w = 1; w < WARPS; ++w) state.merge(states[w][lane].read());
  reinterpret_cast<half2*>(a.out + row)[lane] = __floats2half2_rn(state.value(0), state.value(1));
}

}  // namespace
}  // namespace ladder

RUNG rung_3_online_softmax(const ladder::Args* a, cudaStream_t stream) {
  ladder::kernel<<<dim3(a->num_heads, a->num_seqs), ladder::THREADS, 0, stream>>>(*a);
  return cudaGetLastError();
}
