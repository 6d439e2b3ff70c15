// The decode engine on tensor cores: the rows of a KV head's group are the eight columns of a product.
//
// Everything is transposed, S' = K Q' and O' = V' P', because a product has 16 rows and 8 columns, and there are few
// queries: keys and columns of values fill the rows, queries the columns. A warp's tile is 16 keys. S' takes
// DIM / 16 products for eight queries, O' as many. With g = lane / 4 and c = lane % 4 a lane holds of S' the keys
// g and g + 8 of queries 2c and 2c + 1; P' must come with the roles of g and c exchanged, which `movmatrix` does
// (fragments: PTX ISA, `mma`).
//
// The maximum that a row's weights are taken against only has to keep them within range, not to be the maximum: it
// follows a row's scores when they outgrow it by 2^8. So most tiles need neither a shuffle nor a rescaling (a weight
// of up to 2^8 loses nothing in half precision). A row's decision is its own.
//
// INT8: a lane's words of four bytes are widened in registers. The order of the columns within a product is
// free, as long as queries and outputs follow it, so each word gives the operands that need no other lane's bytes.
// A key's scale multiplies its score. That of a value enters the exponent, 2^(s + log2 c): a weight in half
// precision keeps its bits however small the scales are.
#pragma once

#include "decode.cuh"

namespace pagetide {

template <typename T, typename KV_, int HEAD_DIM, int ROW_TILES>
struct MmaEngine {
  using KV = KV_;
  static constexpr int DIM = HEAD_DIM;
  static constexpr int TILE = 16;
  static constexpr int ROWS = 8 * ROW_TILES;
  static constexpr int WARPS = DIM <= 128 ? 4 : 2;
  static constexpr int MIN_BLOCKS = DIM <= 64 && ROW_TILES == 1 ? 3 : 2;
  static constexpr int OWN_BYTES = 0;
  static constexpr bool IS_QUANTIZED = sizeof(KV) == 1;
  static constexpr bool IS_NATURAL = false;  // scores are in log2 units
  static constexpr float SLACK = 8.0f;      // how far scores may outgrow a row's maximum
  static constexpr float LEAST_LOG = -64.0f;  // of a value's scale, for that maximum: its sum stays finite
  using Layout = TileLayout<KV, DIM>;
  using State = StateLayout<MmaEngine>;

  const AttentionParams& p;
  const int g = threadIdx.x % WARP / 4;
  const int c = threadIdx.x % 4;
  const float factor;  // of a product, to a score in log2 units
  // Where this lane's rows of the fragments of keys and values begin in a tile.
  const int k_at = Layout::offset(threadIdx.x % 16, threadIdx.x % WARP / 16);
  const int v_at =
      IS_QUANTIZED ? k_at : Layout::offset(threadIdx.x % 8 + threadIdx.x % WARP / 16 * 8, threadIdx.x / 8 % 2);
  int num_rows = 0;
  int positions[ROW_TILES][2];
  uint32_t q[ROW_TILES][DIM / 16][2];
  SoftmaxSum sums[ROW_TILES][2];  // l is this lane's share of the row's
  float acc[ROW_TILES][DIM / 16][4];

  __device__ static constexpr DType query_dtype(const AttentionParams&) { return DTYPE_OF<T>; }

  __device__ __forceinline__ MmaEngine(const AttentionParams& params, unsigned char*)
      : p(params), factor(params.scale * LOG2_E) {}

  // Reads an item's queries.
  __device__ __forceinline__ void begin(const WorkItem& item, int kv_head) {
    num_rows = item.num_rows;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        positions[r][j] = item.seq_len - item.query_len + token_of(item.first_row + 8 * r + 2 * c + j, item, p);
      }
      const int row = 8 * r + g;
      const Place place = place_of(item.first_row + row, item, kv_head, p);
      const T* from = static_cast<const T*>(p.q) + place.token * p.q_token_stride + place.head * p.q_head_stride;
      const bool is_there = row < item.num_rows;
      auto each_pair = [&](auto read) {
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = 16 * i + (IS_QUANTIZED ? 4 * c + 2 * half : 2 * c + 8 * half);
            q[r][i][half] = 0;
            if (is_there) q[r][i][half] = read(column);
          }
        }
      };
      if (p.q_aligned && p.head_dim == DIM) {
        each_pair([&](int column) { return __ldg(reinterpret_cast<const uint32_t*>(from + column)); });
      } else {
        each_pair([&](int column) {
          return column < p.head_dim ? from[column].bits | static_cast<uint32_t>(from[column + 1].bits) << 16 : 0u;
        });
      }
    }
    reset();
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      sums[r][0] = sums[r][1] = SoftmaxSum{};
#pragma unroll
      for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[r][i][j] = 0.0f;
      }
    }
  }

  // The state after one more tile.
  __device__ __forceinline__ void attend(uint32_t tile_smem, int first_key, int first_position, int last_position) {
    constexpr int TILE_BYTES = TILE * Layout::ROW_BYTES;
    // S' = K Q', even and odd steps apart: two chains of products half as long.
    float s[ROW_TILES][2][4] = {};
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      uint32_t k[4];
      if constexpr (IS_QUANTIZED) {
        if (i % 2 == 0) load_matrices(words, tile_smem + Layout::advance(k_at, i));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          k[j] = Widen<T, 0, 1>::pair(words[i % 2 * 2 + j]);
          k[j + 2] = Widen<T, 2, 3>::pair(words[i % 2 * 2 + j]);
        }
      } else {
        load_matrices(k, tile_smem + Layout::advance(k_at, 2 * i));
      }
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) multiply_add<T>(s[r][i % 2], k, q[r][i][0], q[r][i][1]);
    }

    // Scores in log2 units; a mask only where some row does not see some key.
    float k_scales[2] = {1.0f, 1.0f};
    float v_logs[2] = {0.0f, 0.0f};
    if constexpr (IS_QUANTIZED) {
      const float* scales_smem = static_cast<const float*>(at_shared_address(tile_smem + 2 * TILE_BYTES));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        k_scales[half] = scales_smem[g + 8 * half];
        v_logs[half] = log2_approx(scales_smem[TILE + g + 8 * half]);
      }
    }
    const bool is_masked = first_key + TILE - 1 > first_position ||
                           (p.window > 0 && first_key <= last_position - p.window);
    auto each_score = [&](auto change) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) change(s[r][0][j], r, j);
      }
    };
    each_score([&](float& score, int r, int j) {
      score += s[r][1][j];
      if constexpr (IS_QUANTIZED) score *= k_scales[j / 2];
    });
    if (p.soft_cap > 0.0f) {
      each_score([&](float& score, int, int) { score = score_of(score, p); });
    } else {
      each_score([&](float& score, int, int) { score *= factor; });
    }
    if (is_masked) {
      each_score([&](float& score, int r, int j) {
        const int key = first_key + g + j / 2 * 8;
        const int position = positions[r][j % 2];
        const bool is_visible = key <= position && (p.window == 0 || key > position - p.window);
        score = is_visible ? score : -INF;
      });
    }
    bool is_outgrown = false;
    each_score([&](float& score, int r, int j) {
      is_outgrown |= level_of(score, v_logs[j / 2]) > sums[r][j % 2].m + SLACK;
    });
    if (__any_sync(ALL_LANES, is_outgrown)) follow(s, v_logs);

    // P' = 2^(S' - m), from the lanes that computed it to those that multiply with it.
    uint32_t weights[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          SoftmaxSum& sum = sums[r][j];
          const float score = s[r][0][2 * half + j];
          x[j] = sum.weight(score);
          sum.l = __fadd_rn(sum.l, x[j]);
          if constexpr (IS_QUANTIZED) x[j] = sum.weight(score + v_logs[half]);
        }
        weights[r][half] = transpose_matrix(pack<T>(x[0], x[1]));
      }
    }

    // O' += V' P', 16 columns of the values a product.
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      uint32_t v[4];
      if constexpr (IS_QUANTIZED) {
        // A word: columns 2g and 2g + 1 of key 2c, then of key 2c + 1.
        if (i % 2 == 0) load_matrices_transposed(words, tile_smem + TILE_BYTES + Layout::advance(v_at, i));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          v[2 * j] = Widen<T, 0, 2>::pair(words[i % 2 * 2 + j]);
          v[2 * j + 1] = Widen<T, 1, 3>::pair(words[i % 2 * 2 + j]);
        }
      } else {
        load_matrices_transposed(v, tile_smem + TILE_BYTES + Layout::advance(v_at, 2 * i));
      }
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) multiply_add<T>(acc[r][i], v, weights[r][0], weights[r][1]);
    }
  }

  // What a row's maximum must not fall behind: its scores, those of INT8 values with the scale in them.
  __device__ __forceinline__ static float level_of(float score, float v_log) {
    return IS_QUANTIZED ? score + fmaxf(v_log, LEAST_LOG) : score;
  }

  // Brings the maxima of rows that their scores have outgrown up to them.
  __device__ __forceinline__ void follow(const float (&s)[ROW_TILES][2][4], const float (&v_logs)[2]) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float largest = fmaxf(level_of(s[r][0][j], v_logs[0]), level_of(s[r][0][2 + j], v_logs[1]));
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
        }
        SoftmaxSum& sum = sums[r][j];
        const float shrink = sum.raise(largest > sum.m + SLACK ? largest : sum.m);
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
          acc[r][i][j] = __fmul_rn(acc[r][i][j], shrink);
          acc[r][i][2 + j] = __fmul_rn(acc[r][i][2 + j], shrink);
        }
      }
    }
  }

  // This warp's state, as `StateLayout` has it.
  __device__ __forceinline__ void share_state(float* state_smem) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float l = sums[r][j].l;
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2) l += __shfl_xor_sync(ALL_LANES, l, distance);
        const int row = 8 * r + 2 * c + j;
        if (row >= num_rows) continue;
        if (g == 0) {
          state_smem[2 * row] = sums[r][j].m;
          state_smem[2 * row + 1] = l;
        }
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = 16 * i + (IS_QUANTIZED ? 2 * g + half : g + 8 * half);
            state_smem[State::ACC + row * State::PITCH + column] = acc[r][i][2 * half + j];
          }
        }
      }
    }
  }
};

}  // namespace pagetide
