// Many query rows: FlashAttention-2's loop over a paged cache, on tensor cores.
//
// An item is a tile of one sequence's rows (query tokens times the heads of a KV head's group) for one KV head,
// so each key is read once for the whole group (Dao 2023; grouped as in Ainslie et al. 2023). Four warps take 16 or
// 32 rows each; the keys come in tiles of KEYS that all warps share, the next one on its way while one is used.
// Tiles that every row sees whole need no mask; the diagonal ones do. A row's bits do not depend on the rows
// beside it: a tile of which it sees no key leaves its state as it was.
//
//   S = Q K^T          [rows, KEYS], float32 sums in registers
//   m' = max(m, S)     P = 2^(S c - m' c),  c = scale log2(e)
//   l' = l 2^((m - m') c) + sum P,   O' = O 2^((m - m') c) + P V
#pragma once

#include "attention_launch.cuh"
#include "softmax_state.cuh"
#include "tile.cuh"

namespace pagetide {

template <typename T, int HEAD_DIM>
struct PrefillTiles {
  static constexpr int DIM = HEAD_DIM;
  static constexpr int WARPS = 4;
  static constexpr int M_TILES = DIM <= 128 ? 2 : 1;  // of 16 rows, of a warp
  static constexpr int ROWS = WARPS * M_TILES * 16;
  static constexpr int THREADS = WARPS * WARP;
  static constexpr int MIN_BLOCKS = 2;
  using Layout = TileLayout<T, DIM>;
  static constexpr int QUERY_BYTES = ROWS * Layout::ROW_BYTES;

  __host__ __device__ static constexpr int stages(int arch) { return arch < 80 ? 1 : 2; }
  // The longest tile of keys whose scores still fit the registers; sm_75 needs more of them for addresses.
  __host__ __device__ static constexpr int keys(int arch) {
    return (DIM <= 128 ? 64 : 32) / (arch < 80 && DIM >= 128 ? 2 : 1);
  }
  __host__ __device__ static constexpr int tile_bytes(int arch) { return keys(arch) * Layout::ROW_BYTES; }
  __host__ __device__ static constexpr int bytes(int arch) {
    return QUERY_BYTES + stages(arch) * 2 * tile_bytes(arch);  // Q; K and V
  }
};

// Grid (num_kv_heads, items).
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(PrefillTiles<T, HEAD_DIM>::THREADS, PrefillTiles<T, HEAD_DIM>::MIN_BLOCKS)
    prefill_kernel(const __grid_constant__ AttentionParams p) {
  using Tiles = PrefillTiles<T, HEAD_DIM>;
  using Layout = typename Tiles::Layout;
  constexpr int DIM = Tiles::DIM;
  constexpr int KEYS = Tiles::keys(COMPILED_ARCH);
  constexpr int TILE_BYTES = Tiles::tile_bytes(COMPILED_ARCH);
  constexpr int M_TILES = Tiles::M_TILES;
  constexpr int STAGES = Tiles::stages(COMPILED_ARCH);
  extern __shared__ __align__(128) unsigned char smem[];

  // The last tokens of a sequence see the most keys: they start first, so that no long item is left alone at the
  // end.
  const WorkItem item = p.items[p.num_items - 1 - blockIdx.y];
  if (item.sequence < 0) return;
  const int kv_head = blockIdx.x;
  const int thread = threadIdx.x;
  const int lane = thread % WARP;
  const int warp_row = thread / WARP * (16 * M_TILES);
  const int g = lane / 4;
  const int c = lane % 4;
  unsigned char* q_smem = smem;
  unsigned char* tiles_smem = smem + Tiles::QUERY_BYTES;

  // Which keys: from the first that the first row sees to the last that the last row sees.
  const int offset = item.seq_len - item.query_len;
  const int first_position = offset + item.first_row / p.group_size;
  const int last_position = offset + (item.first_row + item.num_rows - 1) / p.group_size;
  const int end_key = max(0, last_position + 1);
  const int begin_tile = p.window > 0 ? max(0, first_position - p.window + 1) / KEYS : 0;
  const int end_tile = (end_key + KEYS - 1) / KEYS;

  const int32_t* table = p.block_tables + item.table_row * p.table_stride;
  const T* k_head = static_cast<const T*>(p.k) + kv_head * p.k_strides.head;
  const T* v_head = static_cast<const T*>(p.v) + kv_head * p.v_strides.head;
  auto blocks_of = [&](int tile) { return blocks_of_tile(table, tile * KEYS, end_key, p.block_shift, KEYS); };
  auto start_copy = [&](int tile, int stage, int blocks) {
    unsigned char* k_tile = tiles_smem + stage * 2 * TILE_BYTES;
    load_tile<T, DIM, KEYS, Tiles::THREADS>(k_tile, k_head, p.k_strides, blocks, tile * KEYS, end_key, p.block_shift,
                                            p.head_dim, p.kv_aligned, thread);
    load_tile<T, DIM, KEYS, Tiles::THREADS>(k_tile + TILE_BYTES, v_head, p.v_strides, blocks, tile * KEYS,
                                            end_key, p.block_shift, p.head_dim, p.kv_aligned, thread);
  };

  // The first keys, then the queries, set off together.
  int next_blocks = blocks_of(begin_tile);
  if (STAGES > 1 && begin_tile < end_tile) {
    start_copy(begin_tile, 0, next_blocks);
    next_blocks = blocks_of(begin_tile + 1);
  }
#pragma unroll 4
  for (int i = thread; i < Tiles::ROWS * Layout::CHUNKS; i += Tiles::THREADS) {
    const int row = i / Layout::CHUNKS;
    const int chunk = i % Layout::CHUNKS;
    const int flat = item.first_row + row;
    const int bytes = row < item.num_rows ? valid_bytes<T>(chunk * Layout::CHUNK, p.head_dim) : 0;
    const int64_t token = item.first_token + flat / p.group_size;
    const int64_t head = kv_head * p.group_size + flat % p.group_size;
    const T* from =
        static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride + chunk * Layout::CHUNK;
    unsigned char* to = q_smem + Layout::offset(row, chunk);
    if (p.q_aligned) {
      copy_16_async(to, bytes ? from : p.q, bytes);
    } else {
      gather_chunk(to, from, bytes);
    }
  }
  commit_copies();

  // Where this lane's rows of each fragment begin: queries, keys, values.
  int q_at = Layout::offset(warp_row + lane % 16, lane / 16);
  int k_at = Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  int v_at = Layout::offset(lane % 16, lane / 16);
  // Scores of raw products are scaled inside the exponent, c = scale log2(e). With a soft cap the scores are log2
  // units already. A negative scale would turn the maximum around, so then the products are negated; of a zero
  // scale only the -inf of a masked score must survive.
  const bool has_cap = p.soft_cap > 0.0f;
  const float sign = p.scale < 0.0f ? -1.0f : 1.0f;
  const float factor = has_cap ? 1.0f : fmaxf(fabsf(p.scale) * LOG2_E, 1e-37f);

  SoftmaxSum sums[M_TILES][2];  // m of the products; l is this lane's share of the row's
  float acc[M_TILES][DIM / 8][4] = {};

  int stage = 0;
  for (int tile = begin_tile; tile < end_tile; ++tile) {
    if constexpr (STAGES == 1) {
      __syncthreads();  // all warps have used the tile that this one overwrites
      start_copy(tile, 0, next_blocks);
      commit_copies();
      next_blocks = blocks_of(tile + 1);
    }
    wait_copies<0>();
    __syncthreads();  // every thread's part of the tile has landed, and all warps have used the tile before
    if constexpr (STAGES > 1) {
      if (tile + 1 < end_tile) {
        start_copy(tile + 1, stage ^ 1, next_blocks);
        next_blocks = blocks_of(tile + 2);
      }
      commit_copies();
    }
    const unsigned char* k_smem = tiles_smem + stage * 2 * TILE_BYTES;
    const unsigned char* v_smem = k_smem + TILE_BYTES;
    if constexpr (STAGES > 1) stage ^= 1;

    // Opaque, so that the compiler computes the addresses anew for each tile: long rows leave it no registers.
    if constexpr (COMPILED_ARCH < 90 && DIM >= 128) asm volatile("" : "+r"(q_at), "+r"(k_at), "+r"(v_at));

    // S = Q K^T: for each 16 columns of the rows, two or four fragments of queries and KEYS / 8 of keys.
    float s[M_TILES][KEYS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      uint32_t q[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        load_matrices(q[m], q_smem + Layout::advance(q_at, 2 * i) + 16 * m * Layout::ROW_BYTES);
      }
#pragma unroll
      for (int n = 0; n < KEYS / 8; n += 2) {
        uint32_t k[4];
        load_matrices(k, k_smem + Layout::advance(k_at, 2 * i) + 8 * n * Layout::ROW_BYTES);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          multiply_add<T>(s[m][n], q[m], k[0], k[1]);
          multiply_add<T>(s[m][n + 1], q[m], k[2], k[3]);
        }
      }
    }

    const int first_key = tile * KEYS;
    const bool is_masked =
        first_key + KEYS - 1 > first_position || (p.window > 0 && first_key <= last_position - p.window);
    if (has_cap || sign < 0.0f || is_masked) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + 16 * m + 8 * half + g;
          const int position = offset + (item.first_row + row) / p.group_size;
          const int first_visible = p.window > 0 ? position - p.window + 1 : 0;
#pragma unroll
          for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& score = s[m][n][2 * half + j];
              score = has_cap ? score_of(score, p) : score * sign;
              const int key = first_key + 8 * n + 2 * c + j;
              if (key > position || key < first_visible) score = -INF;
            }
          }
        }
      }
    }

    // The online softmax; P takes S's place.
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        SoftmaxSum& sum = sums[m][half];
        float largest = -INF;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
          largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        const float before = sum.m;
        sum.m = fmaxf(before, largest);
        const float base = sum.base() * factor;
        const float shrink = exp2_approx(__fmaf_rn(before, factor, -base));
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[m][n][2 * half + j];
            x = exp2_approx(__fmaf_rn(x, factor, -base));
            added = __fadd_rn(added, x);
          }
        }
        sum.l = __fmaf_rn(sum.l, shrink, added);
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i) {
          acc[m][i][2 * half] = __fmul_rn(acc[m][i][2 * half], shrink);
          acc[m][i][2 * half + 1] = __fmul_rn(acc[m][i][2 * half + 1], shrink);
        }
      }
    }

    // O += P V, 16 keys and 16 columns at a time.
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
      uint32_t weights[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          weights[m][j] = pack<T>(s[m][n + j / 2][2 * (j % 2)], s[m][n + j / 2][2 * (j % 2) + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < DIM / 8; i += 2) {
        uint32_t v[4];
        load_matrices_transposed(v, v_smem + Layout::advance(v_at, i) + 8 * n * Layout::ROW_BYTES);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          multiply_add<T>(acc[m][i], weights[m], v[0], v[1]);
          multiply_add<T>(acc[m][i + 1], weights[m], v[2], v[3]);
        }
      }
    }
  }

  // O / l, through the warp's own rows of the queries' place, so that whole chunks go out.
  wait_copies<0>();
  __syncthreads();  // with no tile at all, other threads' copies of queries may still have been on their way
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = sums[m][half].l;
      l += __shfl_xor_sync(ALL_LANES, l, 1);
      l += __shfl_xor_sync(ALL_LANES, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int row = warp_row + 16 * m + 8 * half + g;
#pragma unroll
      for (int i = 0; i < DIM / 8; ++i) {
        *reinterpret_cast<uint32_t*>(q_smem + Layout::offset(row, i) + 4 * c) =
            pack<T>(acc[m][i][2 * half] * inverse, acc[m][i][2 * half + 1] * inverse);
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

template <typename T, int HEAD_DIM>
void launch_prefill_instance(const AttentionParams& params, cudaStream_t stream) {
  using Tiles = PrefillTiles<T, HEAD_DIM>;
  const int bytes = shared_bytes<prefill_kernel<T, HEAD_DIM>, Tiles::bytes>();
  const dim3 grid(params.num_kv_heads, params.num_items);
  prefill_kernel<T, HEAD_DIM><<<grid, Tiles::THREADS, bytes, stream>>>(params);
  check(cudaGetLastError(), "the launch of paged attention");
}

}  // namespace pagetide
