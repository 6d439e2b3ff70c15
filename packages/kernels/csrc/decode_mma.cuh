// The decode engine on tensor cores: the rows of a KV head's group are the 16 rows of one product.
//
// A warp's tile is 16 keys. S = Q K^T takes DIM / 16 products for each half of the tile; the scores come out in
// the registers in which P enters O += P V, so between the two there is only the online softmax, whose row
// maxima need two shuffles. With g = lane / 4 and c = lane % 4 a lane holds rows g and g + 8, and of each eight
// columns 2c and 2c + 1 (Dao 2023, section 3; fragments: PTX ISA, `mma`).
#pragma once

#include "decode.cuh"

namespace pagetide {

template <typename T, int HEAD_DIM>
struct MmaEngine {
  using KV = T;
  static constexpr int DIM = HEAD_DIM;
  static constexpr int TILE = 16;
  static constexpr int ROWS = 16;
  static constexpr int WARPS = DIM <= 128 ? 4 : 2;
  static constexpr int MIN_BLOCKS = DIM <= 64 ? 3 : 2;
  using Layout = TileLayout<T, DIM>;
  // Long rows leave no registers for the queries: they stay in shared memory, read again for each tile.
  static constexpr bool QUERIES_IN_REGISTERS = DIM <= 128;
  static constexpr bool TOTALS_IN_REGISTERS = DIM <= 128;
  static constexpr int OWN_BYTES = QUERIES_IN_REGISTERS ? 0 : ROWS * Layout::ROW_BYTES;

  const AttentionParams& p;
  const int num_rows;
  const int g = threadIdx.x % WARP / 4;
  const int c = threadIdx.x % 4;
  int positions[2];  // of rows g and g + 8
  unsigned char* const q_smem;
  uint32_t q[QUERIES_IN_REGISTERS ? DIM / 16 : 1][4];
  SoftmaxSum sums[2];  // l is this lane's share of the row's
  float acc[DIM / 8][4];

  __device__ static constexpr DType query_dtype(const AttentionParams&) { return DTYPE_OF<T>; }

  // The pair of queries at one of the group's rows; zeros beyond the last row or column.
  __device__ __forceinline__ uint32_t query_pair(const WorkItem& item, int kv_head, int row, int column) const {
    if (row >= num_rows || column >= p.head_dim) return 0;
    const int flat = item.first_row + row;
    const int64_t token = item.first_token + flat / p.group_size;
    const int64_t head = kv_head * p.group_size + flat % p.group_size;
    const T* from = static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride + column;
    return p.q_aligned ? __ldg(reinterpret_cast<const uint32_t*>(from))
                       : from[0].bits | static_cast<uint32_t>(from[1].bits) << 16;
  }

  __device__ __forceinline__ MmaEngine(const AttentionParams& params, const WorkItem& item, int kv_head,
                                       unsigned char* own_smem)
      : p(params), num_rows(item.num_rows), q_smem(own_smem) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      positions[half] = item.seq_len - item.query_len + (item.first_row + g + 8 * half) / p.group_size;
    }
    if constexpr (QUERIES_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < DIM / 8; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          q[i / 2][half + 2 * (i % 2)] = query_pair(item, kv_head, g + 8 * half, 8 * i + 2 * c);
        }
      }
    } else {
      for (int i = threadIdx.x; i < ROWS * DIM / 2; i += WARPS * WARP) {
        const int row = i / (DIM / 2);
        const int column = 2 * (i % (DIM / 2));
        *reinterpret_cast<uint32_t*>(q_smem + Layout::offset(row, column / 8) + column % 8 * 2) =
            query_pair(item, kv_head, row, column);
      }
      __syncthreads();  // all queries are in shared memory
    }
    reset();
  }

  __device__ __forceinline__ void reset() {
    sums[0] = sums[1] = SoftmaxSum{};
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
    }
  }

  // The state after one more tile.
  __device__ __forceinline__ void attend(const unsigned char* k_smem, const unsigned char* v_smem, const float*,
                                         int first_key, int first_position, int last_position) {
    const int lane = threadIdx.x % WARP;
    // S = Q K^T, 16 rows x 16 keys, even and odd steps apart: two chains of products half as long.
    float s[2][2][4] = {};
    const int k_at = Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const int q_at = Layout::offset(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      uint32_t k[4];
      load_matrices(k, k_smem + Layout::advance(k_at, 2 * i));
      uint32_t(&rows)[4] = q[QUERIES_IN_REGISTERS ? i : 0];
      if constexpr (!QUERIES_IN_REGISTERS) {
        load_matrices(rows, q_smem + Layout::advance(q_at, 2 * i));
      }
      multiply_add<T>(s[i % 2][0], rows, k[0], k[1]);
      multiply_add<T>(s[i % 2][1], rows, k[2], k[3]);
    }

    // Scores in log2 units; a mask only where some row does not see some key.
    const bool is_masked = first_key + TILE - 1 > first_position ||
                           (p.window > 0 && first_key <= last_position - p.window);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float& score = s[0][j / 4][j % 4];
      score = score_of(score + s[1][j / 4][j % 4], p);
      if (is_masked) {
        const int key = first_key + j / 4 * 8 + 2 * c + j % 2;
        const int position = positions[j % 4 / 2];
        const bool is_visible = key <= position && (p.window == 0 || key > position - p.window);
        score = is_visible ? score : -INF;
      }
    }

    // The online softmax: m <- max(m, scores), acc and l shrink by 2^(m_old - m), P = 2^(S - m).
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(fmaxf(s[0][0][2 * half], s[0][0][2 * half + 1]),
                            fmaxf(s[0][1][2 * half], s[0][1][2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
      shrink[half] = sums[half].raise(largest);
    }
    // Mostly the maximum stays, and a factor of 1 changes nothing.
    if (__any_sync(ALL_LANES, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < DIM / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = __fmul_rn(acc[i][j], shrink[j / 2]);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float& score = s[0][j / 4][j % 4];
      score = sums[j % 4 / 2].weight(score);
      sums[j % 4 / 2].l = __fadd_rn(sums[j % 4 / 2].l, score);
    }
    const uint32_t weights[4] = {pack<T>(s[0][0][0], s[0][0][1]), pack<T>(s[0][0][2], s[0][0][3]),
                                 pack<T>(s[0][1][0], s[0][1][1]), pack<T>(s[0][1][2], s[0][1][3])};

    // O += P V, 16 keys, eight columns a product.
    const int v_at = Layout::offset(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < DIM / 8; i += 2) {
      uint32_t v[4];
      load_matrices_transposed(v, v_smem + Layout::advance(v_at, i));
      multiply_add<T>(acc[i], weights, v[0], v[1]);
      multiply_add<T>(acc[i + 1], weights, v[2], v[3]);
    }
  }

  // Rows 8 pass to 8 pass + 7 of this warp's state: m [8], l [8], acc [8, DIM].
  __device__ __forceinline__ void share_rows(int pass, float* state_smem) {
    float l = sums[pass].l;
    l += __shfl_xor_sync(ALL_LANES, l, 1);
    l += __shfl_xor_sync(ALL_LANES, l, 2);
    if (c == 0) {
      state_smem[g] = sums[pass].m;
      state_smem[8 + g] = l;
    }
    float* row = state_smem + 16 + g * DIM;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) {
      *reinterpret_cast<float2*>(row + state_column<DIM>(g, 8 * i + 2 * c)) =
          make_float2(acc[i][2 * pass], acc[i][2 * pass + 1]);
    }
  }
};

}  // namespace pagetide
