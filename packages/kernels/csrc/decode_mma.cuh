// The decode engine on tensor cores: the rows of a KV head's group are the eight columns of a product.
//
// Everything is transposed, S' = K Q' and O' = V' P', because a product has 16 rows and 8 columns, and there are few
// queries: keys and columns of values fill the rows, queries the columns. Of 16 keys, a part of a warp's tile, S' takes
// DIM / 16 products for eight queries, O' as many. With g = lane / 4 and c = lane % 4 a lane holds of S' the keys
// g and g + 8 of queries 2c and 2c + 1; P' must come with the roles of g and c exchanged, which `movmatrix` does
// (fragments: PTX ISA, `mma`). The parts of a tile go side by side, so that neither waits for the other's latencies.
//
// The maximum that a row's weights are taken against only has to keep them within range, not to be the maximum: it
// follows a row's scores when they outgrow it by 2^8. So most tiles need neither a shuffle nor a rescaling (a weight
// of up to 2^8 loses nothing in half precision). A row's decision is its own.
//
// INT8: a lane's words of four bytes are widened in registers. The order of the columns within a product is
// free, as long as queries and outputs follow it, so each word gives the operands that need no other lane's bytes.
// A key's scale multiplies its score. That of a value, c, multiplies its weight, and the maximum is over s + log2 c: a
// weight in half precision keeps its bits however small the scales are.
#pragma once

#include "decode_launch.cuh"

namespace pagetide {

template <typename T, typename KV_, int HEAD_DIM, int ROW_TILES>
struct MmaEngine {
  using KV = KV_;
  static constexpr int DIM = HEAD_DIM;
  static constexpr bool IS_QUANTIZED = sizeof(KV) == 1;
  static constexpr int TILE = DIM <= 64 || (DIM <= 128 && IS_QUANTIZED) ? 32 : 16;  // what shared memory allows
  static constexpr int PARTS = TILE / 16;
  static constexpr int CHAINS = PARTS > 1 && DIM <= 64 ? 1 : 2;  // of a score's products, where one would be waited for
  static constexpr int ROWS = 8 * ROW_TILES;
  static constexpr int WARPS = DIM <= 128 ? 4 : 2;
  static constexpr int MIN_BLOCKS = DIM > 64 || ROW_TILES > 1 ? 2 : IS_QUANTIZED ? 4 : 3;
  static constexpr int OWN_BYTES = 0;
  static constexpr bool IS_NATURAL = false;  // scores are in log2 units
  static constexpr float SLACK = 8.0f;       // how far scores may outgrow a row's maximum:
  static constexpr float MOST = 0x1p8f;      // a weight, with its value's scale
  static constexpr float LEAST_LOG = -64.0f;  // of that scale, for the maximum: so a weight without it stays finite,
  static constexpr float LARGEST = MOST * 0x1p64f;
  static constexpr float NO_KEY = -1e30f;  // the maximum before any key: finite, and everything outgrows it
  using Widened = Widen<T, 0, 1>;
  static constexpr bool IS_BIASED = IS_QUANTIZED && Widened::BIAS != 0.0f;
  using Layout = TileLayout<KV, DIM>;
  using State = StateLayout<MmaEngine>;

  const AttentionParams& p;
  const int g = threadIdx.x % WARP / 4;
  const int c = threadIdx.x % 4;
  const float factor;  // of a product, to a score in log2 units
  // Where this lane's rows of the fragments of keys and values begin in a tile.
  const int k_at = kept(uint32_t(Layout::offset(threadIdx.x % 16, threadIdx.x % WARP / 16)));
  const int v_at = IS_QUANTIZED ? k_at
                                : kept(uint32_t(Layout::offset(threadIdx.x % 8 + threadIdx.x % WARP / 16 * 8,
                                                               threadIdx.x / 8 % 2)));
  int num_rows = 0;
  bool is_fresh;  // no key of the leaf has been seen
  int positions[ROW_TILES][2];
  uint32_t q[ROW_TILES][DIM / 16][2];
  float biases[ROW_TILES][CHAINS][2];  // minus what the bias of widened keys adds to the row's products
  SoftmaxSum sums[ROW_TILES][2];  // l is this lane's share of the row's
  float acc[ROW_TILES][DIM / 16][4];

  __device__ static constexpr DType query_dtype(const AttentionParams&) { return DTYPE_OF<T>; }

  __device__ __forceinline__ MmaEngine(const AttentionParams& params, unsigned char*)
      : p(params), factor(params.scale * LOG2_E) {}

  // Starts to read an item's queries.
  __device__ __forceinline__ void load(const WorkItem& item, int kv_head) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
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
        each_pair([&](int column) { return *reinterpret_cast<const uint32_t*>(from + column); });
      } else {
        each_pair([&](int column) {
          return column < p.head_dim ? from[column].bits | static_cast<uint32_t>(from[column + 1].bits) << 16 : 0u;
        });
      }
    }
  }

  // Begins an item, whose queries have been read.
  __device__ __forceinline__ void begin(const WorkItem& item, int) {
    num_rows = item.num_rows;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        positions[r][j] = item.seq_len - item.query_len + token_of(item.first_row + 8 * r + 2 * c + j, item, p);
      }
      if constexpr (IS_BIASED) {
        const uint32_t bias = pack<T>(-Widened::BIAS, -Widened::BIAS);
        const uint32_t all[4] = {bias, bias, bias, bias};
#pragma unroll
        for (int chain = 0; chain < CHAINS; ++chain) {
          float sum[4] = {};
#pragma unroll
          for (int i = chain; i < DIM / 16; i += CHAINS) multiply_add<T>(sum, all, q[r][i][0], q[r][i][1]);
          biases[r][chain][0] = sum[0];
          biases[r][chain][1] = sum[1];
        }
      }
    }
    reset();
  }

  __device__ __forceinline__ void reset() {
    is_fresh = true;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      sums[r][0] = sums[r][1] = SoftmaxSum{NO_KEY};
#pragma unroll
      for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[r][i][j] = 0.0f;
      }
    }
  }

  // The state after one more tile. In a plain one every row sees every key, and no score is capped.
  __device__ __forceinline__ void attend(uint32_t tile_smem, int first_key, bool is_plain) {
    constexpr int TILE_BYTES = TILE * Layout::ROW_BYTES;
    constexpr int PART_BYTES = 16 * Layout::ROW_BYTES;
    // S' = K Q'.
    float s[PARTS][ROW_TILES][CHAINS][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int j = 0; j < 4 * CHAINS; ++j) s[part][r][j / 4][j % 4] = IS_BIASED ? biases[r][j / 4][j % 2] : 0.0f;
      }
    }
    uint32_t words[PARTS][4];
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const uint32_t part_smem = tile_smem + part * PART_BYTES;
        uint32_t k[4];
        if constexpr (IS_QUANTIZED) {
          if (i % 2 == 0) load_matrices(words[part], part_smem + Layout::advance(k_at, i));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            k[j] = Widen<T, 0, 1>::biased(words[part][i % 2 * 2 + j]);
            k[j + 2] = Widen<T, 2, 3>::biased(words[part][i % 2 * 2 + j]);
          }
        } else {
          load_matrices(k, part_smem + Layout::advance(k_at, 2 * i));
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) multiply_add<T>(s[part][r][i % CHAINS], k, q[r][i][0], q[r][i][1]);
      }
    }

    // From products to scores in log2 units: a factor, a key's own where it has a scale.
    float factors[PARTS][2];
    float v_scales[PARTS][2];
    const float* scales_smem = static_cast<const float*>(at_shared_address(tile_smem + 2 * TILE_BYTES));
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = 16 * part + 8 * half + g;
        factors[part][half] = IS_QUANTIZED ? factor * scales_smem[key] : factor;
        v_scales[part][half] = IS_QUANTIZED ? scales_smem[TILE + key] : 1.0f;
      }
    }
    auto each_score = [&](auto change) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
          for (int j = 0; j < 4; ++j) change(s[part][r][0][j], part, r, j);
        }
      }
    };
    if constexpr (CHAINS == 2) {
      each_score([&](float& score, int part, int r, int j) { score += s[part][r][CHAINS - 1][j]; });
    }
    if (!is_plain) {
      each_score([&](float& score, int part, int r, int j) {
        score *= factors[part][j / 2];
        if (p.soft_cap > 0.0f) score = capped(score);
        const int key = first_key + 16 * part + g + j / 2 * 8;
        const int position = positions[r][j % 2];
        const bool is_visible = key <= position && (p.window == 0 || key > position - p.window);
        score = is_visible ? score : -INF;
      });
#pragma unroll
      for (int part = 0; part < PARTS; ++part) factors[part][0] = factors[part][1] = 1.0f;
    }
    // Weights against the rows' maxima so far. If some score has outgrown its row's, that is brought up to it first.
    float w[PARTS][ROW_TILES][4];
    auto weigh = [&] {
      bool is_outgrown = false;
      each_score([&](float& score, int part, int r, int j) {
        float& weight = w[part][r][j];
        weight = exp2_approx(__fmaf_rn(score, factors[part][j / 2], -sums[r][j % 2].m));
        is_outgrown |= weight * v_scales[part][j / 2] > MOST;
        if constexpr (IS_QUANTIZED) is_outgrown |= weight > LARGEST;
      });
      return is_outgrown;
    };
    if (is_fresh || __any_sync(ALL_LANES, weigh())) {
      is_fresh = false;
      follow(s, factors, v_scales);
      weigh();
    }

    // P', from the lanes that computed it to those that multiply with it.
    uint32_t weights[PARTS][ROW_TILES][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* pair = w[part][r] + 2 * half;
#pragma unroll
          for (int j = 0; j < 2; ++j) sums[r][j].l = __fadd_rn(sums[r][j].l, pair[j]);
          const float v_scale = v_scales[part][half];
          weights[part][r][half] = transpose_matrix(pack<T>(pair[0] * v_scale, pair[1] * v_scale));
        }
      }
    }

    // O' += V' P', 16 columns of the values a product.
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const uint32_t part_smem = tile_smem + TILE_BYTES + part * PART_BYTES;
#pragma unroll
      for (int i = 0; i < DIM / 16; ++i) {
        uint32_t v[4];
        if constexpr (IS_QUANTIZED) {
          // A word: columns 2g and 2g + 1 of key 2c, then of key 2c + 1.
          if (i % 2 == 0) load_matrices_transposed(words[part], part_smem + Layout::advance(v_at, i));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            v[2 * j] = Widen<T, 0, 2>::pair(words[part][i % 2 * 2 + j]);
            v[2 * j + 1] = Widen<T, 1, 3>::pair(words[part][i % 2 * 2 + j]);
          }
        } else {
          load_matrices_transposed(v, part_smem + Layout::advance(v_at, 2 * i));
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          multiply_add<T>(acc[r][i], v, weights[part][r][0], weights[part][r][1]);
        }
      }
    }
  }

  // A score in log2 units, capped. tanh(x) = 1 - 2 / (1 + e^2x): exact at both ends, between them an absolute error far
  // below a half's.
  __device__ __forceinline__ float capped(float score) const {
    const float grown = exp2_approx(score * __fdividef(2.0f, p.soft_cap));
    return p.soft_cap * LOG2_E * (1.0f - __fdividef(2.0f, 1.0f + grown));
  }

  // Brings the maxima of rows that their scores have outgrown, those of INT8 values with the scale in them, up to them.
  __device__ __forceinline__ void follow(const float (&s)[PARTS][ROW_TILES][CHAINS][4],
                                         const float (&factors)[PARTS][2], const float (&v_scales)[PARTS][2]) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float largest = -INF;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float level = s[part][r][0][2 * half + j] * factors[part][half];
            if constexpr (IS_QUANTIZED) level += fmaxf(log2_approx(v_scales[part][half]), LEAST_LOG);
            largest = fmaxf(largest, level);
          }
        }
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
