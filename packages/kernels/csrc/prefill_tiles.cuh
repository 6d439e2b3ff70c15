// What the tiles of the prefill kernel hold and take, on cards without warpgroup products and for wide heads.
#pragma once

#include "tile.cuh"

namespace pagetide {

template <typename ELEMENT, typename STORED, int HEAD_DIM>
struct PrefillTiles {
  using T = ELEMENT;  // of queries, outputs and products
  using KV = STORED;  // of the cache: T, or int8_t
  static constexpr bool IS_QUANTIZED = sizeof(KV) == 1;
  static constexpr int DIM = HEAD_DIM;
  static constexpr int WARPS = 4;
  static constexpr int M_TILES = DIM <= 128 ? 2 : 1;  // of 16 rows, of a warp
  static constexpr int ROWS = WARPS * M_TILES * 16;
  static constexpr int THREADS = WARPS * WARP;
  static constexpr int MIN_BLOCKS = 2;
  using QueryLayout = TileLayout<T, DIM>;
  using KeyLayout = TileLayout<KV, DIM>;
  static constexpr int QUERY_BYTES = ROWS * QueryLayout::ROW_BYTES;

  __host__ __device__ static constexpr int stages(int arch) { return arch < 80 ? 1 : 2; }
  // The longest tile of keys whose scores still fit the registers; sm_75 needs more of them for addresses, INT8 for
  // what it widens.
  __host__ __device__ static constexpr int keys(int arch) {
    return DIM <= 128 ? (DIM == 128 && (arch < 80 || IS_QUANTIZED) ? 32 : 64) : (arch < 80 && !IS_QUANTIZED ? 16 : 32);
  }
  __host__ __device__ static constexpr int tile_bytes(int arch) { return keys(arch) * KeyLayout::ROW_BYTES; }
  __host__ __device__ static constexpr int terms_bytes(int arch) { return IS_QUANTIZED ? 3 * 4 * keys(arch) : 0; }
  __host__ __device__ static constexpr int stage_bytes(int arch) { return 2 * tile_bytes(arch) + terms_bytes(arch); }
  __host__ __device__ static constexpr int bytes(int arch) {
    return QUERY_BYTES + stages(arch) * stage_bytes(arch);  // Q; K, V and what their scales are
  }
};

// Puts the queries' columns in the order of INT8 fragments: of 16, lane c's pairs are 4c, 4c + 1 and 4c + 2, 4c + 3.
template <class Tiles>
__device__ __forceinline__ void part_queries(unsigned char* q_smem, int thread) {
  using Layout = typename Tiles::QueryLayout;
  for (int i = thread; i < Tiles::ROWS * Layout::CHUNKS / 2; i += Tiles::THREADS) {
    const int row = i / (Layout::CHUNKS / 2);
    const int chunk = i % (Layout::CHUNKS / 2) * 2;
    uint4& left = *reinterpret_cast<uint4*>(q_smem + Layout::offset(row, chunk));
    uint4& right = *reinterpret_cast<uint4*>(q_smem + Layout::offset(row, chunk + 1));
    const uint4 a = left;
    const uint4 b = right;
    left = make_uint4(a.x, a.z, b.x, b.z);
    right = make_uint4(a.y, a.w, b.y, b.w);
  }
}

}  // namespace pagetide
