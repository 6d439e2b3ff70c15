// Rung 2: keys and values come in tiles of 64 through shared memory, read from global memory whole lines at a time.
// Rows are padded by two elements, so that the threads' keys lie in different banks. Still two passes.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int TILE = 64;
constexpr int PITCH = DIM + 2;

__device__ void load(half (*tile)[PITCH], const Args& a, const half* cache, int sequence, int kv_head, int first,
                     int num_keys) {
  for (int i = threadIdx.x; i < TILE * DIM / 2; i += THREADS) {
    const int row = i / (DIM / 2), column = i % (DIM / 2) * 2;
    const half2 zero = __float2half2_rn(0.0f);
    const half* from = cache + (first + row < num_keys ? row_of(a, sequence, kv_head, first + row) + column : 0);
    *reinterpret_cast<half2*>(&tile[row][column]) =
        first + row < num_keys ? *reinterpret_cast<const half2*>(from) : zero;
  }
}

__global__ void kernel(Args a) {
  extern __shared__ float scores[];
  __shared__ half tile[TILE][PITCH];
  __shared__ float q[DIM], sums[2];
  __shared__ float halves[DIM];
  const int head = blockIdx.x, sequence = blockIdx.y, thread = threadIdx.x;
  const int kv_head = head / (a.num_heads / a.num_kv_heads);
  const int num_keys = a.seq_lens[sequence];
  const int64_t row = (int64_t{sequence} * a.num_heads + head) * DIM;
  if (thread < DIM) q[thread] = __half2float(a.q[row + thread]);

  for (int first = 0; first < num_keys; first += TILE) {
    __syncthreads();  // the tile before has been used
    load(tile, a, a.k, sequence, kv_head, first, num_keys);
    __syncthreads();  // the tile, and the query, are there
    if (thread < TILE && first + thread < num_keys) {
      float score = 0.0f;
      for (int i = 0; i < DIM; ++i) score += q[i] * __half2float(tile[thread][i]);
      scores[first + thread] = score * a.scale;
    }
  }
  __syncthreads();  // all scores are there
  if (thread < WARP) {
    float largest = -INF, sum = 0.0f;
    for (int key = thread; key < num_keys; key += WARP) largest = fmaxf(largest, scores[key]);
    for (int d = WARP / 2; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, d));
    for (int key = thread; key < num_keys; key += WARP) sum += expf(scores[key] - largest);
    for (int d = WARP / 2; d > 0; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    if (thread == 0) sums[0] = largest, sums[1] = sum;
  }

  float value = 0.0f;  // of one column, over every second key
  for (int first = 0; first < num_keys; first += TILE) {
    __syncthreads();  // the maximum is there, and the tile before has been used
    load(tile, a, a.v, sequence, kv_head, first, num_keys);
    __syncthreads();  // the tile is there
    for (int i = thread / DIM; i < TILE && first + i < num_keys; i += 2) {
      value += expf(scores[first + i] - sums[0]) * __half2float(tile[i][thread % DIM]);
    }
  }
  if (thread >= DIM) halves[thread - DIM] = value;
  __syncthreads();  // the second half is there
  if (thread < DIM) a.out[row + thread] = __float2half((value + halves[thread]) / sums[1]);
}

}  // namespace
}  // namespace ladder

RUNG rung_2_shared_tiles(const ladder::Args* a, cudaStream_t stream) {
  const dim3 grid(a->num_heads, a->num_seqs);
  ladder::kernel<<<grid, ladder::THREADS, a->max_seq_len * 4, stream>>>(*a);
  return cudaGetLastError();
}
