// Rung 1: a thread block a head. A thread takes a key, then a column, and reads it from global memory by itself:
// neighbouring threads read addresses 128 bytes apart. Two passes over the scores: the maximum, then the sum.
#include "ladder.cuh"

namespace ladder {
namespace {

template <typename Op>
__device__ float reduce(float x, float* memory, Op op) {
  memory[threadIdx.x] = x;
  for (int distance = THREADS / 2; distance > 0; distance /= 2) {
    __syncthreads();  // the halves that are added are written
    if (threadIdx.x < distance) memory[threadIdx.x] = op(memory[threadIdx.x], memory[threadIdx.x + distance]);
  }
  __syncthreads();
  x = memory[0];
  __syncthreads();  // all have read before the memory serves again
  return x;
}

__global__ void kernel(Args a) {
  extern __shared__ float scores[];
  __shared__ float memory[THREADS];
  const int head = blockIdx.x, sequence = blockIdx.y;
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  const int num_keys = a.seq_lens[sequence];
  const half* q = a.q + (int64_t{sequence} * a.num_heads + head) * DIM;

  float largest = -INF;
  for (int key = threadIdx.x; key < num_keys; key += THREADS) {
    const half* k = a.k + row_of(a, sequence, kv_head, key);
    float score = 0.0f;
    for (int i = 0; i < DIM; ++i) score += __half2float(q[i]) * __half2float(k[i]);
    scores[key] = score * a.scale;
    largest = fmaxf(largest, scores[key]);
  }
  largest = reduce(largest, memory, [](float x, float y) { return fmaxf(x, y); });
  float sum = 0.0f;
  for (int key = threadIdx.x; key < num_keys; key += THREADS) {
    scores[key] = expf(scores[key] - largest);
    sum += scores[key];
  }
  sum = reduce(sum, memory, [](float x, float y) { return x + y; });

  if (threadIdx.x >= DIM) return;
  float value = 0.0f;
  for (int key = 0; key < num_keys; ++key) {
    value += scores[key] * __half2float(a.v[row_of(a, sequence, kv_head, key) + threadIdx.x]);
  }
  a.out[(int64_t{sequence} * a.num_heads + head) * DIM + threadIdx.x] = __float2half(value / sum);
}

}  // namespace
}  // namespace ladder

RUNG rung_1_naive(const ladder::Args* a, cudaStream_t stream) {
  const dim3 grid(a->num_heads, a->num_seqs);
  ladder::kernel<<<grid, ladder::THREADS, a->max_seq_len * 4, stream>>>(*a);
  return cudaGetLastError();
}
