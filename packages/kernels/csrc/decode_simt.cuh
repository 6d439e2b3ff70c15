// The decode engine on CUDA cores: float32 queries.
//
// A warp's tile is 8 keys (4 where a row is 1 KB). Scores: lane l takes key l % TILE and a part of its columns, so
// a key's dot product ends with a shuffle or two across the parts; the queries, as floats, are read from shared
// memory by broadcast. Values: lane l takes DIM / 32 columns, and each key's weight is read by broadcast.
// All arithmetic is float32; an INT8 scale multiplies the score, or the weight, of its key.
#pragma once

#include "decode_launch.cuh"

namespace pagetide {

template <typename T, int HEAD_DIM>
struct SimtEngine {
  using KV = T;
  static constexpr int DIM = HEAD_DIM;
  static constexpr int TILE = DIM * int(sizeof(T)) >= 1024 ? 4 : 8;
  static constexpr int ROWS = 8;
  static constexpr int WARPS = DIM <= 128 ? 4 : 2;
  static constexpr int MIN_BLOCKS = 2;
  // Scores stay as they are: in log2 units a score of 30, of a soft cap, rounds half as much again as PyTorch's.
  static constexpr bool IS_NATURAL = true;
  using State = StateLayout<SimtEngine>;
  using Layout = TileLayout<T, DIM>;
  static constexpr int QUERY_BYTES = ROWS * DIM * 4;
  static constexpr int WEIGHT_BYTES = ROWS * TILE * 4;  // a warp's
  static constexpr int OWN_BYTES = QUERY_BYTES + WARPS * WEIGHT_BYTES;
  static constexpr int PARTS = WARP / TILE;                 // lanes that share a key
  static constexpr int PART_CHUNKS = Layout::CHUNKS / PARTS;
  static constexpr int COLUMNS = DIM / WARP;                // of a lane, for values
  static_assert(Layout::CHUNKS % PARTS == 0 && DIM % WARP == 0, "columns divide evenly among lanes");

  const AttentionParams& p;
  int num_rows;
  const int lane = threadIdx.x % WARP;
  float* const q_smem;
  float* const weights_smem;
  int positions[ROWS];
  SumOf<true> sums[ROWS];  // l is this lane's key's share of the row's
  float acc[ROWS][COLUMNS];

  __device__ static __forceinline__ DType query_dtype(const AttentionParams& p) { return p.query_dtype; }

  template <typename Q>
  __device__ __forceinline__ void load_queries(const WorkItem& item, int kv_head) const {
    for (int i = threadIdx.x; i < ROWS * DIM; i += WARPS * WARP) {
      const int row = i / DIM;
      const int column = i % DIM;
      const Place place = place_of(item.first_row + row, item, kv_head, p);
      const bool is_there = row < num_rows && column < p.head_dim;
      const Q* from =
          static_cast<const Q*>(p.q) + place.token * p.q_token_stride + place.head * p.q_head_stride + column;
      q_smem[i] = is_there ? to_float(*from) : 0.0f;
    }
  }

  __device__ __forceinline__ SimtEngine(const AttentionParams& params, unsigned char* own_smem)
      : p(params),
        q_smem(reinterpret_cast<float*>(own_smem)),
        weights_smem(reinterpret_cast<float*>(own_smem + QUERY_BYTES + threadIdx.x / WARP * WEIGHT_BYTES)) {}

  __device__ __forceinline__ void load(const WorkItem&, int) {}  // they go to shared memory, which the last may need

  __device__ __forceinline__ void begin(const WorkItem& item, int kv_head) {
    num_rows = item.num_rows;
    __syncthreads();  // all warps have read the queries of the item before
    switch (p.query_dtype) {
      case DType::FLOAT32: load_queries<float>(item, kv_head); break;
      case DType::FLOAT16: load_queries<Half>(item, kv_head); break;
      default: load_queries<BFloat>(item, kv_head);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      positions[r] = item.seq_len - item.query_len + token_of(item.first_row + r, item, p);
    }
    reset();
    __syncthreads();  // all queries are in shared memory
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sums[r] = SumOf<true>{};
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) acc[r][i] = 0.0f;
    }
  }

  // This lane's columns of a value row.
  __device__ __forceinline__ void read_values(const unsigned char* v_smem, int row, float (&v)[COLUMNS]) const {
    constexpr int BYTES = COLUMNS * int(sizeof(T));
    constexpr int PER_WORD = 4 / int(sizeof(T));
    constexpr int WORDS = (BYTES + 3) / 4;
    uint32_t words[WORDS];
    const unsigned char* at = v_smem + Layout::offset(row, lane * BYTES / 16) + lane * BYTES % 16;
    if constexpr (BYTES == 2) {
      words[0] = *reinterpret_cast<const uint16_t*>(at);
    } else if constexpr (BYTES == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(at);
    } else if constexpr (BYTES == 8) {
      const uint2 x = *reinterpret_cast<const uint2*>(at);
      words[0] = x.x, words[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < BYTES / 16; ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(v_smem + Layout::offset(row, lane * BYTES / 16 + i));
        words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
      }
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      float x[PER_WORD];
      unpack(words[i], x, T{});
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j) {
        if (i * PER_WORD + j < COLUMNS) v[i * PER_WORD + j] = x[j];
      }
    }
  }

  // The state after one more tile.
  __device__ __forceinline__ void attend(uint32_t tile_smem, int first_key, bool is_plain) {
    const auto* k_smem = static_cast<const unsigned char*>(at_shared_address(tile_smem));
    const unsigned char* v_smem = k_smem + TILE * Layout::ROW_BYTES;
    const float* scales_smem = reinterpret_cast<const float*>(v_smem + TILE * Layout::ROW_BYTES);
    const int key = lane % TILE;
    const int part = lane / TILE;
    constexpr int CHUNK = Layout::CHUNK;
    constexpr bool IS_QUANTIZED = sizeof(T) == 1;

    // Dot products over this lane's part of its key, then across the parts. Sixteen columns at a time make a sum of
    // their own: one chain over all of them would round a long row's score twice as much.
    constexpr int RUN = 16 / CHUNK;  // chunks
    float s[ROWS] = {};
    float run[ROWS];
#pragma unroll
    for (int i = 0; i < PART_CHUNKS; ++i) {
      const int chunk = part * PART_CHUNKS + i;
      const uint4 x = *reinterpret_cast<const uint4*>(k_smem + Layout::offset(key, chunk));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
      float k[4][CHUNK / 4];
#pragma unroll
      for (int w = 0; w < 4; ++w) unpack(words[w], k[w], T{});
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (r >= num_rows) continue;
        if (i % RUN == 0) run[r] = 0.0f;
        const float4* q = reinterpret_cast<const float4*>(q_smem + r * DIM + chunk * CHUNK);
#pragma unroll
        for (int j = 0; j < CHUNK; j += 4) {
          const float4 four = q[j / 4];
          constexpr int N = CHUNK / 4;
          run[r] = fmaf(four.x, k[j / N][j % N], run[r]);
          run[r] = fmaf(four.y, k[(j + 1) / N][(j + 1) % N], run[r]);
          run[r] = fmaf(four.z, k[(j + 2) / N][(j + 2) % N], run[r]);
          run[r] = fmaf(four.w, k[(j + 3) / N][(j + 3) % N], run[r]);
        }
        if (i % RUN == RUN - 1 || i == PART_CHUNKS - 1) s[r] = __fadd_rn(s[r], run[r]);
      }
    }

    const int key_position = first_key + key;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= num_rows) continue;
#pragma unroll
      for (int distance = TILE; distance < WARP; distance *= 2) {
        s[r] += __shfl_xor_sync(ALL_LANES, s[r], distance);
      }
      if (IS_QUANTIZED) s[r] *= scales_smem[key];
      float score = s[r] * p.scale;
      if (p.soft_cap > 0.0f) score = p.soft_cap * tanhf(score / p.soft_cap);  // relatively exact near 0 too
      if (!is_plain) {
        const bool is_visible =
            key_position <= positions[r] && (p.window == 0 || key_position > positions[r] - p.window);
        score = is_visible ? score : -INF;
      }
      // The online softmax of one row over the tile's keys.
      float largest = score;
#pragma unroll
      for (int distance = 1; distance < TILE; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
      }
      const float shrink = sums[r].raise(largest);
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) acc[r][i] = __fmul_rn(acc[r][i], shrink);
      const float weight = sums[r].weight(score);
      sums[r].l = __fadd_rn(sums[r].l, weight);
      if (part == 0) weights_smem[r * TILE + key] = IS_QUANTIZED ? weight * scales_smem[TILE + key] : weight;
    }
    __syncwarp();  // the weights are in shared memory; the main loop's barrier keeps them until all have read

    // O += P V, four keys at a time.
#pragma unroll
    for (int first = 0; first < TILE; first += 4) {
      float v[4][COLUMNS];
#pragma unroll
      for (int i = 0; i < 4; ++i) read_values(v_smem, first + i, v[i]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (r >= num_rows) continue;
        const float4 w = *reinterpret_cast<const float4*>(weights_smem + r * TILE + first);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
          acc[r][i] = fmaf(w.w, v[3][i], fmaf(w.z, v[2][i], fmaf(w.y, v[1][i], fmaf(w.x, v[0][i], acc[r][i]))));
        }
      }
    }
  }

  // This warp's state, as `StateLayout` has it.
  __device__ __forceinline__ void share_state(float* state_smem) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float l = sums[r].l;
#pragma unroll
      for (int distance = 1; distance < TILE; distance *= 2) l += __shfl_xor_sync(ALL_LANES, l, distance);
      if (lane == 0) {
        state_smem[2 * r] = sums[r].m;
        state_smem[2 * r + 1] = l;
      }
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) {
        state_smem[State::ACC + r * State::PITCH + lane * COLUMNS + i] = acc[r][i];
      }
    }
  }
};

}  // namespace pagetide
