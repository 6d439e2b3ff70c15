// Rung 5: a sequence's keys are split among thread blocks, so that one sequence fills the card. The last block to
// arrive merges what all have left, in the splits' order: one launch, the same bits every time.
#include "async_ring.cuh"

namespace ladder {
namespace {

constexpr int ROW = DIM + 2;  // m, l, acc

__global__ void kernel(Args a) {
  __shared__ bool is_last;
  const int head = blockIdx.x, sequence = blockIdx.y, lane = threadIdx.x;
  const int num_keys = a.seq_lens[sequence];
  const int num_splits = (num_keys + SPLIT - 1) / SPLIT;
  if (int(blockIdx.z) >= num_splits) return;
  const int begin = blockIdx.z * SPLIT;
  SoftmaxState<8> state = walk(a, head, sequence, begin, min(begin + SPLIT, num_keys));
  if (lane >= 8) return;
  if (num_splits > 1) {
    constexpr unsigned EIGHT = 0xffu;
    auto left_by = [&](int split) {
      return a.states + ((int64_t{sequence} * gridDim.z + split) * a.num_heads + head) * ROW;
    };
    float* mine = left_by(blockIdx.z);
    if (lane == 0) __stcg(mine, state.m), __stcg(mine + 1, state.l);
    for (int i = 0; i < 8; ++i) __stcg(mine + 2 + lane * 8 + i, state.acc[i]);
    __threadfence();  // what this lane left is seen by all before its block arrives
    __syncwarp(EIGHT);
    if (lane == 0) {
      int* arrivals = a.arrivals + sequence * a.num_heads + head;
      is_last = atomicAdd(arrivals, 1) == num_splits - 1;
      if (is_last) *arrivals = 0;
    }
    __syncwarp(EIGHT);
    if (!is_last) return;
    __threadfence();
    state = SoftmaxState<8>{};
    for (int split = 0; split < num_splits; ++split) {
      const float* from = left_by(split);
      SoftmaxState<8> next;
      next.m = __ldcg(from), next.l = __ldcg(from + 1);
      for (int i = 0; i < 8; ++i) next.acc[i] = __ldcg(from + 2 + lane * 8 + i);
      state.merge(next);
    }
  }
  write(a, head, sequence, state);
}

}  // namespace
}  // namespace ladder

RUNG rung_5_split_kv(const ladder::Args* a, cudaStream_t stream) {
  const dim3 grid(a->num_heads, a->num_seqs, (a->max_seq_len + ladder::SPLIT - 1) / ladder::SPLIT);
  ladder::kernel<<<grid, ladder::THREADS, 0, stream>>>(*a);
  return cudaGetLastError();
}
