// A tile of keys or values: where it lies in shared memory, and how it gets there through the table.
#pragma once

#include "params.h"
#include "primitives.cuh"

namespace pagetide {

template <typename T>
constexpr DType DTYPE_OF = DType::FLOAT32;
template <>
constexpr DType DTYPE_OF<Half> = DType::FLOAT16;
template <>
constexpr DType DTYPE_OF<BFloat> = DType::BFLOAT16;
template <>
constexpr DType DTYPE_OF<int8_t> = DType::INT8;

// Rows of DIM elements as chunks of 16 bytes, placed so that eight rows' chunks of one column lie in
// different banks: rows of a power of two of chunks are permuted in place, others padded to an odd number.
template <typename T, int DIM>
struct TileLayout {
  static constexpr int CHUNK = 16 / int(sizeof(T));  // elements
  static constexpr int CHUNKS = DIM / CHUNK;         // of a row
  static constexpr bool PERMUTED = (CHUNKS & (CHUNKS - 1)) == 0;
  static constexpr int ROW_BYTES = 16 * (PERMUTED ? CHUNKS : CHUNKS | 1);
  static_assert(DIM % CHUNK == 0 && CHUNKS >= 4, "a row is at least 64 bytes, in whole chunks");

  __device__ static __forceinline__ int offset(int row, int chunk) {
    if constexpr (!PERMUTED) return row * ROW_BYTES + chunk * 16;
    const int key = CHUNKS >= 8 ? row & 7 : (row >> 1) & 3;
    return row * ROW_BYTES + ((chunk ^ key) * 16);
  }

  // From an offset in one of the first `rows` rows, a power of two below 8 (of 4, with rows of 64 bytes, any), to the
  // same chunk `rows` times some further: within eight rows their order is permuted alike.
  __device__ static __forceinline__ int rows_further(int offset, int rows) {
    const int key = !PERMUTED ? 0 : CHUNKS >= 8 ? rows & 7 : (rows >> 1) & 3;
    return (offset ^ (key * 16)) + rows * ROW_BYTES;
  }

  // From the offset of chunk 0 or 1 to that of the chunk `chunks` further, an even number; one operation. Going on
  // by 8 rows is adding 8 ROW_BYTES.
  __device__ static __forceinline__ int advance(int offset, int chunks) {
    return PERMUTED ? offset ^ (chunks * 16) : offset + chunks * 16;
  }
};

// Bytes of 16 at `element` that belong to a row of `length` elements.
template <typename T>
__device__ __forceinline__ int valid_bytes(int element, int length) {
  return max(0, min(16, (length - element) * int(sizeof(T))));
}

// A chunk element by element, for rows that no vector load may touch; zeros beyond `bytes`. Slow and short.
template <typename T>
__device__ __forceinline__ void gather_chunk(void* to_smem, const T* from_gmem, int bytes) {
#pragma unroll 1
  for (int i = 0; i < int(16 / sizeof(T)); ++i) {
    static_cast<T*>(to_smem)[i] = i * int(sizeof(T)) < bytes ? from_gmem[i] : T{};
  }
}

// Which block holds each eighth key of a tile: lane l of a warp holds that of keys 8 l to 8 l + 7 (a block
// is a multiple of 8 keys). Keys from `end_key` on have none.
__device__ __forceinline__ int blocks_of_tile(const int32_t* table, int first_key, int end_key, int block_shift,
                                              int num_keys) {
  const int group = threadIdx.x % WARP;
  const int key = first_key + 8 * group;
  return 8 * group < num_keys && key < end_key ? __ldg(table + (key >> block_shift)) : 0;
}

// Starts the copy of ROWS rows (of K or V, one KV head) to shared memory, by THREADS threads of whole warps.
// Rows of keys from `end_key` on, and columns from `head_dim` on, become zeros: what lies there is not the
// sequence's, and a weight of 0 times NaN would be NaN.
template <typename T, int DIM, int ROWS, int THREADS, bool IS_UNROLLED = true>
__device__ __forceinline__ void load_tile(unsigned char* tile_smem, const T* head_gmem, Strides strides, int blocks,
                                          int first_key, int end_key, int block_shift, int head_dim, bool is_aligned,
                                          int thread) {
  using Layout = TileLayout<T, DIM>;
  constexpr int TOTAL = ROWS * Layout::CHUNKS;
  static_assert(TOTAL % THREADS == 0, "every thread takes part in every pass: it also lends its block id");
  const int slot_mask = (1 << block_shift) - 1;
  // Opaque, so that the compiler does not keep every pass's addresses in registers from tile to tile.
  asm volatile("" : "+r"(thread));
  auto chunk_of = [&](int pass, auto copy) {
    const int index = pass * THREADS + thread;
    const int row = index / Layout::CHUNKS;
    const int chunk = index % Layout::CHUNKS;
    const int key = first_key + row;
    const int64_t block = __shfl_sync(ALL_LANES, blocks, row / 8);
    const int bytes = key < end_key ? valid_bytes<T>(chunk * Layout::CHUNK, head_dim) : 0;
    const T* from = head_gmem + block * strides.block + (key & slot_mask) * strides.slot + chunk * Layout::CHUNK;
    copy(tile_smem + Layout::offset(row, chunk), bytes ? from : head_gmem, bytes);
  };
  if (is_aligned) {
#pragma unroll IS_UNROLLED ? TOTAL / THREADS : 1
    for (int pass = 0; pass < TOTAL / THREADS; ++pass) {
      chunk_of(pass, [](void* to, const T* from, int bytes) { copy_16_async(to, from, bytes); });
    }
  } else {
#pragma unroll 1
    for (int pass = 0; pass < TOTAL / THREADS; ++pass) {
      chunk_of(pass, [](void* to, const T* from, int bytes) { gather_chunk(to, from, bytes); });
    }
  }
}

// The score that a query row gives a key, in log2 units, from their dot product.
__device__ __forceinline__ float score_of(float product, const AttentionParams& p) {
  float score = product * p.scale;
  if (p.soft_cap > 0.0f) {
    // tanh(x) = 1 - 2 / (1 + e^2x): exact at both ends, between them an absolute error far below a half's.
    const float grown = exp2_approx(score * (2.0f * LOG2_E / p.soft_cap));
    score = p.soft_cap * (1.0f - __fdividef(2.0f, 1.0f + grown));
  }
  return score * LOG2_E;
}

}  // namespace pagetide
