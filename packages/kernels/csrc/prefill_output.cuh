// The end of a row tile of the prefill kernel: what its rows have summed goes out.
#pragma once

#include "prefill_tiles.cuh"
#include "softmax_state.cuh"

namespace pagetide {

// O / l of a warp's rows, through their own place among the queries, so that whole chunks go out. No copy may be on
// its way there.
template <class Tiles>
__device__ __forceinline__ void write_outputs(const AttentionParams& p, const WorkItem& item, int kv_head,
                                              unsigned char* q_smem, int warp_row, int lane,
                                              const SoftmaxSum (&sums)[Tiles::M_TILES][2],
                                              const float (&acc)[Tiles::M_TILES][Tiles::DIM / 8][4]) {
  using T = typename Tiles::T;
  using Layout = typename Tiles::QueryLayout;
  constexpr bool IS_QUANTIZED = Tiles::IS_QUANTIZED;
  constexpr int DIM = Tiles::DIM;
  constexpr int M_TILES = Tiles::M_TILES;
  const int g = lane / 4;
  const int c = lane % 4;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = sums[m][half].l;
      l += __shfl_xor_sync(ALL_LANES, l, 1);
      l += __shfl_xor_sync(ALL_LANES, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int row = warp_row + 16 * m + 8 * half + g;
      // Columns 2c and 2c + 1 of eight; of INT8 columns 4c to 4c + 3 of 16, parted.
#pragma unroll
      for (int i = 0; i < DIM / 8; i += 2) {
        auto value = [&](int tile, int j) { return acc[m][i + tile][2 * half + j] * inverse; };
        auto place = [&](int chunk, int bytes) {
          return reinterpret_cast<uint32_t*>(q_smem + Layout::offset(row, i + chunk) + bytes);
        };
        if constexpr (IS_QUANTIZED) {
          *place(c / 2, c % 2 * 8) = pack<T>(value(0, 0), value(1, 0));
          *place(c / 2, c % 2 * 8 + 4) = pack<T>(value(0, 1), value(1, 1));
        } else {
          *place(0, 4 * c) = pack<T>(value(0, 0), value(0, 1));
          *place(1, 4 * c) = pack<T>(value(1, 0), value(1, 1));
        }
      }
    }
  }
  __syncwarp();  // the warp's rows are in shared memory
#pragma unroll 4
  for (int i = lane; i < 16 * M_TILES * Layout::CHUNKS; i += WARP) {
    const int row = warp_row + i / Layout::CHUNKS;
    const int chunk = i % Layout::CHUNKS;
    const int column = chunk * Layout::CHUNK;
    if (row >= item.num_rows || column >= p.head_dim) continue;
    const int flat = item.first_row + row;
    const int64_t token = item.first_token + flat / p.group_size;
    const int64_t head = kv_head * p.group_size + flat % p.group_size;
    T* to = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + column;
    const unsigned char* from = q_smem + Layout::offset(row, chunk);
    if (p.out_aligned) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < Layout::CHUNK; ++j) to[j] = reinterpret_cast<const T*>(from)[j];
    }
  }
}

}  // namespace pagetide
