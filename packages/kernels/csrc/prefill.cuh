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
//
// INT8 keys and values lie in shared memory as they are stored, and each warp widens its fragments in registers. The
// order of the columns within a product is free, as long as both operands follow it, and a word of four bytes gives
// those that need no other lane's bytes. So queries are parted alike, and the outputs come out parted.
#pragma once

#include "prefill_output.cuh"
#include "prefill_scales.cuh"
#include "prefill_tiles.cuh"
#include "softmax_state.cuh"

namespace pagetide {

// Grid (num_kv_heads, items, parts of an item).
template <class Tiles>
__global__ void __launch_bounds__(Tiles::THREADS, Tiles::MIN_BLOCKS)
    prefill_kernel(const __grid_constant__ AttentionParams p) {
  using T = typename Tiles::T;
  using KV = typename Tiles::KV;
  using Layout = typename Tiles::QueryLayout;
  using KeyLayout = typename Tiles::KeyLayout;
  constexpr bool IS_QUANTIZED = Tiles::IS_QUANTIZED;
  constexpr int DIM = Tiles::DIM;
  constexpr int KEYS = Tiles::keys(COMPILED_ARCH);
  constexpr int TILE_BYTES = Tiles::tile_bytes(COMPILED_ARCH);
  constexpr int M_TILES = Tiles::M_TILES;
  constexpr int STAGES = Tiles::stages(COMPILED_ARCH);
  extern __shared__ __align__(128) unsigned char smem[];

  // The last tokens of a sequence see the most keys: they start first, so that no long item is left alone at the
  // end.
  WorkItem item = p.items[p.num_items - 1 - blockIdx.y];
  item.first_row += blockIdx.z * Tiles::ROWS;
  item.num_rows = min(item.num_rows - int(blockIdx.z) * Tiles::ROWS, Tiles::ROWS);
  if (item.sequence < 0 || item.num_rows <= 0) return;
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
  const KV* k_head = static_cast<const KV*>(p.k) + kv_head * p.k_strides.head;
  const KV* v_head = static_cast<const KV*>(p.v) + kv_head * p.v_strides.head;
  auto blocks_of = [&](int tile) { return blocks_of_tile(table, tile * KEYS, end_key, p.block_shift, KEYS); };
  auto start_copy = [&](int tile, int stage, int blocks) {
    unsigned char* k_tile = tiles_smem + stage * Tiles::stage_bytes(COMPILED_ARCH);
    const int first_key = tile * KEYS;
    load_tile<KV, DIM, KEYS, Tiles::THREADS>(k_tile, k_head, p.k_strides, blocks, first_key, end_key, p.block_shift,
                                             p.head_dim, p.kv_aligned, thread);
    load_tile<KV, DIM, KEYS, Tiles::THREADS>(k_tile + TILE_BYTES, v_head, p.v_strides, blocks, first_key, end_key,
                                             p.block_shift, p.head_dim, p.kv_aligned, thread);
    if constexpr (IS_QUANTIZED) {  // a thread a key: its scales for now, its terms when they have landed
      const int block = __shfl_sync(ALL_LANES, blocks, thread / 8 % WARP);
      const int slot = (first_key + thread) & ((1 << p.block_shift) - 1);
      const bool is_there = first_key + thread < end_key;
      KeyTerms<KEYS>& terms = *reinterpret_cast<KeyTerms<KEYS>*>(k_tile + 2 * TILE_BYTES);
      if (thread < KEYS) {
        copy_4_async(&terms.factors[thread], scale_of(p.k_scales, p.k_scale_strides, kv_head, block, slot), is_there);
        copy_4_async(&terms.logs[thread], scale_of(p.v_scales, p.v_scale_strides, kv_head, block, slot), is_there);
      }
    }
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
  if constexpr (IS_QUANTIZED) {
    wait_copies<0>();
    __syncthreads();  // all queries have landed
    part_queries<Tiles>(q_smem, thread);
  }

  // Where this lane's rows of each fragment begin: queries, keys, values.
  int q_at = Layout::offset(warp_row + lane % 16, lane / 16);
  int k_at = IS_QUANTIZED ? KeyLayout::offset(lane, 0) : KeyLayout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  int v_at = KeyLayout::offset(lane % 16, lane / 16);
  // Scores of raw products are scaled inside the exponent, c = scale log2(e). With a soft cap the scores are log2
  // units already. A negative scale would turn the maximum around, so then the products are negated; of a zero
  // scale only the -inf of a masked score must survive.
  const bool has_cap = p.soft_cap > 0.0f;
  const float sign = p.scale < 0.0f ? -1.0f : 1.0f;
  const float factor = IS_QUANTIZED || has_cap ? 1.0f : fmaxf(fabsf(p.scale) * LOG2_E, 1e-37f);

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
    const unsigned char* k_smem = tiles_smem + stage * Tiles::stage_bytes(COMPILED_ARCH);
    const unsigned char* v_smem = k_smem + TILE_BYTES;
    KeyTerms<KEYS>& terms = *reinterpret_cast<KeyTerms<KEYS>*>(
        tiles_smem + stage * Tiles::stage_bytes(COMPILED_ARCH) + 2 * TILE_BYTES);
    if (IS_QUANTIZED && thread < KEYS) terms.set(thread, terms.factors[thread], terms.logs[thread], p);
    __syncthreads();  // every thread's part of the tile has landed, and all warps have used the tile before
    if constexpr (STAGES > 1) {
      if (tile + 1 < end_tile) {
        start_copy(tile + 1, stage ^ 1, next_blocks);
        next_blocks = blocks_of(tile + 2);
      }
      commit_copies();
    }
    if constexpr (STAGES > 1) stage ^= 1;

    // Opaque, so that the compiler computes the addresses anew for each tile: long rows leave it no registers.
    if constexpr (COMPILED_ARCH < 90 && DIM >= 128) asm volatile("" : "+r"(q_at), "+r"(k_at), "+r"(v_at));

    // S = Q K^T: for each 16 columns of the rows, one or two fragments of queries and KEYS / 8 of keys, of which a load
    // brings two, of INT8 four.
    constexpr int LOADED = IS_QUANTIZED ? 4 : 2;
    float s[M_TILES][KEYS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      uint32_t q[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        load_matrices(q[m], q_smem + Layout::advance(q_at, 2 * i) + 16 * m * Layout::ROW_BYTES);
      }
#pragma unroll
      for (int n = 0; n < KEYS / 8; n += LOADED) {
        uint32_t words[4];
        load_matrices(words, k_smem + KeyLayout::advance(k_at, 4 / LOADED * i) + 8 * n * KeyLayout::ROW_BYTES);
#pragma unroll
        for (int j = 0; j < LOADED; ++j) {
          uint32_t k[2];
          if constexpr (IS_QUANTIZED) {
            k[0] = Widen<T, 0, 1>::pair(words[j]);
            k[1] = Widen<T, 2, 3>::pair(words[j]);
          } else {
            k[0] = words[2 * j];
            k[1] = words[2 * j + 1];
          }
#pragma unroll
          for (int m = 0; m < M_TILES; ++m) multiply_add<T>(s[m][n + j], q[m], k[0], k[1]);
        }
      }
    }

    const int first_key = tile * KEYS;
    const bool is_masked =
        first_key + KEYS - 1 > first_position || (p.window > 0 && first_key <= last_position - p.window);
    if constexpr (IS_QUANTIZED) {
      auto each_score = [&](auto change) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
          const float2 factors = terms.pair(terms.factors, 8 * n + 2 * c);
          const float2 logs = terms.pair(terms.logs, 8 * n + 2 * c);
#pragma unroll
          for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              change(s[m][n][j], j % 2 == 0 ? factors.x : factors.y, j % 2 == 0 ? logs.x : logs.y);
            }
          }
        }
      };
      if (has_cap) {
        each_score([&](float& x, float by, float log) { x = score_of(x * by, p) + log; });
      } else {
        each_score([&](float& x, float by, float log) { x = __fmaf_rn(x, by, log); });
      }
    }
    if ((!IS_QUANTIZED && (has_cap || sign < 0.0f)) || is_masked) {
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
              if constexpr (!IS_QUANTIZED) score = has_cap ? score_of(score, p) : score * sign;
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
        const float shrink = exp2_approx((before - sum.base()) * factor);  // exactly 1 if the maximum stays
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
          float2 inverses{};
          if constexpr (IS_QUANTIZED) inverses = terms.pair(terms.inverses, 8 * n + 2 * c);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[m][n][2 * half + j];
            x = exp2_approx(__fmaf_rn(x, factor, -base));
            added = IS_QUANTIZED ? __fmaf_rn(x, j == 0 ? inverses.x : inverses.y, added) : __fadd_rn(added, x);
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

    // O += P V, 16 keys and 16 columns at a time. A load of INT8 values serves 32 columns: of 16 the even ones and the
    // odd ones are a product each.
    constexpr int STEPS = IS_QUANTIZED ? 2 : 1;
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
      for (int i = 0; i < DIM / 8; i += 2 * STEPS) {
        uint32_t words[4];
        load_matrices_transposed(words,
                                 v_smem + KeyLayout::advance(v_at, i / STEPS) + 8 * n * KeyLayout::ROW_BYTES);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          uint32_t v[4] = {words[0], words[1], words[2], words[3]};
          if constexpr (IS_QUANTIZED) {
            v[0] = Widen<T, 0, 2>::pair(words[2 * step]);
            v[1] = Widen<T, 0, 2>::pair(words[2 * step + 1]);
            v[2] = Widen<T, 1, 3>::pair(words[2 * step]);
            v[3] = Widen<T, 1, 3>::pair(words[2 * step + 1]);
          }
#pragma unroll
          for (int m = 0; m < M_TILES; ++m) {
            multiply_add<T>(acc[m][i + 2 * step], weights[m], v[0], v[1]);
            multiply_add<T>(acc[m][i + 2 * step + 1], weights[m], v[2], v[3]);
          }
        }
      }
    }
  }

  wait_copies<0>();
  __syncthreads();  // with no tile at all, other threads' copies of queries may still have been on their way
  write_outputs<Tiles>(p, item, kv_head, q_smem, warp_row, lane, sums, acc);
}

}  // namespace pagetide
