// What every rung of the ladder computes: one decode step, float16, head_dim 64, blocks of 16 keys.
//
// q, out [sequences, num_heads, 64]; k, v [blocks, num_kv_heads, 16, 64]; tables [sequences, table_stride]. The
// query of a sequence sees all its `seq_lens[sequence]` keys. Each rung changes one thing of the one before.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "softmax_state.cuh"

namespace ladder {

using pagetide::ALL_LANES;
using pagetide::INF;
using pagetide::LOG2_E;
using pagetide::SoftmaxState;
using pagetide::WARP;

constexpr int DIM = 64;
constexpr int BLOCK_SIZE = 16;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int SPLIT = 128;  // keys of a thread block, from the rung that splits

struct Args {
  half* out;
  const half* q;
  const half* k;
  const half* v;
  const int* tables;
  const int* seq_lens;
  float* states;  // [sequences, splits, num_heads, 66], what the splits leave
  int* arrivals;  // [sequences, num_heads], zeros between launches
  int num_seqs, num_heads, num_kv_heads, table_stride, max_seq_len;
  float scale;
};

// Where key `key` of a sequence begins, in k or v.
__device__ __forceinline__ int64_t row_of(const Args& a, int sequence, int kv_head, int key) {
  const int64_t block = a.tables[sequence * a.table_stride + key / BLOCK_SIZE];
  return ((block * a.num_kv_heads + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * DIM;
}

// A state in shared memory, where nothing is constructed.
template <int N>
struct StoredState {
  float m, l, acc[N];

  __device__ __forceinline__ void operator=(const SoftmaxState<N>& state) {
    m = state.m, l = state.l;
    for (int i = 0; i < N; ++i) acc[i] = state.acc[i];
  }
  __device__ __forceinline__ SoftmaxState<N> read() const {
    SoftmaxState<N> state;
    state.m = m, state.l = l;
    for (int i = 0; i < N; ++i) state.acc[i] = acc[i];
    return state;
  }
};

}  // namespace ladder

#define RUNG extern "C" __attribute__((visibility("default"))) int
