// INT8 caches: the producer of the Hopper prefill kernel widens what it copies, for the tensor cores read operands of
// 16 bits from shared memory.
//
// A tile comes through registers, where it waits for a stage to become free. Then its bytes become numbers of T,
// exactly, and go to their place, and the next tile's loads set off for the registers that become free one by one.
#pragma once

#include "prefill_hopper_tiles.cuh"

namespace pagetide {

// 16 bytes. Where it stands is where the load sets off.
__device__ __forceinline__ uint4 load_16(const void* from_gmem) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from_gmem));
  return x;
}

// 16 bytes one by one, for rows that no vector load may touch; zeros beyond `bytes`. Slow and short.
__device__ __forceinline__ uint4 gather_16(const int8_t* from_gmem, int bytes) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = 0;
#pragma unroll 1
    for (int byte = min(bytes - 4 * i, 4) - 1; byte >= 0; --byte) {
      words[i] = words[i] << 8 | uint8_t(__ldg(from_gmem + 4 * i + byte));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Tiles>
struct TileCopier<Tiles, true> {
  using T = typename Tiles::T;
  using Memory = HopperMemory<Tiles>;
  using Panel = Panels<Tiles::KEYS>;
  // A thread has 16 columns, two chunks, of a row a pass. Eight threads have two rows of one panel: their chunks lie in
  // eight different groups of banks.
  static constexpr int ROWS_A_PASS = WARPGROUP / (4 * Memory::PANELS);
  static constexpr int PASSES = Tiles::KEYS / ROWS_A_PASS;

  const AttentionParams& p;
  unsigned char* smem;
  HopperShared<Tiles>& shared;
  const int thread;
  const int column = thread / 8 % Memory::PANELS * 64 + thread % 4 * 16;
  const int first_row = thread / (8 * Memory::PANELS) * 2 + thread / 4 % 2;
  RingPlace<Tiles::STAGES> k_place, v_place;
  RingPlace<HopperShared<Tiles>::TERMS> terms_place;
  // What waits in registers.
  enum { NOTHING, KEYS, VALUES } waiting = NOTHING;
  uint4 words[PASSES] = {};
  float k_scale = 0.0f, v_scale = 0.0f;  // of the thread's key

  __device__ __forceinline__ TileCopier(const AttentionParams& params, unsigned char* smem,
                                        HopperShared<Tiles>& shared, int thread)
      : p(params), smem(smem), shared(shared), thread(thread) {}

  __device__ __forceinline__ void copy_keys(const HeadTile& tile) {
    exchange(p.k, p.k_strides, tile);
    waiting = KEYS;
    const int key = tile.first_key + thread;
    const int block = __shfl_sync(ALL_LANES, tile.blocks, thread / 8 % WARP);
    const int slot = key & ((1 << p.block_shift) - 1);
    k_scale = v_scale = 0.0f;
    if (thread < Tiles::KEYS && key < tile.end_key) {
      k_scale = __ldg(scale_of(p.k_scales, p.k_scale_strides, tile.kv_head, block, slot));
      v_scale = __ldg(scale_of(p.v_scales, p.v_scale_strides, tile.kv_head, block, slot));
    }
  }
  __device__ __forceinline__ void copy_values(const HeadTile& tile) {
    exchange(p.v, p.v_strides, tile);
    waiting = VALUES;
  }
  // Lands the last one.
  __device__ __forceinline__ void finish() {
    land([](int, const uint4& x) { return x; });
  }

 private:
  // Lands what waits; the tile named takes its place. Nothing need become zero, for any byte is a number: the weights
  // of keys behind the sequence's end are zero, and so are the queries' columns from head_dim on, for which a row's
  // first ones are read. A load that only some threads did would be waited for at once.
  __device__ __forceinline__ void exchange(const void* gmem, const Strides& strides, const HeadTile& tile) {
    const int bytes = max(0, min(16, p.head_dim - column));
    const int8_t* from_column =
        static_cast<const int8_t*>(gmem) + tile.kv_head * strides.head + (bytes > 0 ? column : 0);
    const uint32_t slot_mask = (1u << p.block_shift) - 1;
    auto source = [&](int pass) {
      const int row = first_row + pass * ROWS_A_PASS;
      const uint32_t block = __shfl_sync(ALL_LANES, tile.blocks, row / 8);
      const uint32_t slot = (tile.first_key + row) & slot_mask;
      // The launcher has seen that strides fit 32 bits: a product and a sum of 64 bits are then one instruction.
      return from_column + uint64_t(block) * uint32_t(strides.block) + slot * uint32_t(strides.slot);
    };
    if (p.kv_aligned && p.head_dim % 16 == 0) {
      land([&](int pass, const uint4&) { return load_16(source(pass)); });
    } else {
      land([&](int pass, const uint4&) { return gather_16(source(pass), bytes); });
    }
  }

  // Puts what waits to its place, and `next` of each pass into the registers. At first nothing waits: what is stored
  // then is announced to nobody.
  template <class Next>
  __device__ __forceinline__ void land(Next next) {
    const bool is_keys = waiting == KEYS;
    RingBarriers<Tiles::STAGES>& ring = is_keys ? shared.keys : shared.values;
    const int stage = is_keys ? k_place.stage : v_place.stage;
    const uint32_t first = shared_address(smem + (is_keys ? Memory::K_AT : Memory::V_AT)) + stage * Memory::TILE_BYTES +
                           Panel::offset(first_row, column / 8);
    if (waiting != NOTHING) wait(ring.empty[stage], (is_keys ? k_place.parity : v_place.parity) ^ 1);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const uint4 x = words[pass];
      const uint32_t at = first + pass * ROWS_A_PASS * Panel::ROW_BYTES;
      store_widened(at, x.x, x.y);
      store_widened(at ^ 16, x.z, x.w);
      words[pass] = next(pass, x);
    }
    if (waiting == NOTHING) return;
    if (is_keys) {
      if (thread < Tiles::KEYS) shared.terms[terms_place.stage].set(thread, k_scale, v_scale, p);
      terms_place.advance();
      k_place.advance();
    } else {
      v_place.advance();
    }
    fence_async_proxy();
    arrive(ring.full[stage]);
  }

  __device__ __forceinline__ static void store_widened(uint32_t to_smem, uint32_t low, uint32_t high) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to_smem), "r"(Widen<T, 0, 1>::pair(low)),
                 "r"(Widen<T, 2, 3>::pair(low)), "r"(Widen<T, 0, 1>::pair(high)), "r"(Widen<T, 2, 3>::pair(high))
                 : "memory");
  }
};

}  // namespace pagetide
