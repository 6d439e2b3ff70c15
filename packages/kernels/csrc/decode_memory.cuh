// How a thread block of the decode kernel divides its shared memory.
#pragma once

#include "decode_state.cuh"

namespace pagetide {

// By which a thread block's warps meet, and a cluster's blocks.
struct alignas(16) DecodeMeeting {
  Barrier finished;  // complete when every warp has announced the next leaf; with two buffers of states
  Barrier sent;      // counts what the others of a cluster send to its first block
  bool is_last;      // to arrive of a sequence's thread blocks
};

// How an engine's thread block divides its shared memory: the engine's own, totals, the warps' rings, their states,
// where they meet; behind that, in a cluster's first block, the states of the others' leaves. None of it is static,
// which would cost as much as its alignment.
template <class Engine>
struct DecodeMemory {
  static constexpr int TILE_BYTES = Engine::TILE * Engine::Layout::ROW_BYTES;
  static constexpr bool IS_QUANTIZED = sizeof(typename Engine::KV) == 1;
  static constexpr int SCALE_BYTES = IS_QUANTIZED ? Engine::TILE * 4 : 0;
  static constexpr int STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);  // K and V
  static constexpr int STEP_BYTES = Engine::WARPS * STAGE_BYTES;
  static constexpr int FIXED_BYTES = Engine::OWN_BYTES + Total<Engine>::BYTES;
  static_assert(Engine::ROWS == 8 || Total<Engine>::BYTES == 0, "the memory of a total is that of eight rows");
  static constexpr int STATE_BYTES = StateLayout<Engine>::FLOATS * 4;
  static constexpr int ALL_STATE_BYTES = Engine::WARPS * STATE_BYTES;
  static constexpr int MAX_STAGES = Engine::DIM <= 64 ? 2 : 3;

  // What one thread block may use: its part of 228 KB on a large card (each block takes 1 KB and some besides), of
  // 99 KB on others, and there a half if that is enough.
  __host__ __device__ static constexpr bool is_large(int arch) { return arch >= 90 && arch < 120; }
  __host__ __device__ static constexpr int budget(int arch) {
    if (is_large(arch)) return 228 * 1024 / Engine::MIN_BLOCKS - 1280;
    constexpr int HALF = 48 * 1024;
    return FIXED_BYTES + ALL_STATE_BYTES + 2 * STEP_BYTES <= HALF ? HALF : 99 * 1024;
  }
  // Without asynchronous copies a tile is copied when its turn has come, and the states take the tiles' place.
  __host__ __device__ static constexpr bool is_async(int arch) { return arch >= 80; }
  // Two buffers of states let a warp go on while others finish a leaf. Where leaves are long, a stage more is better.
  __host__ __device__ static constexpr int buffers(int arch) {
    if (Engine::DIM > 64 || !is_large(arch)) return 1;
    return budget(arch) - FIXED_BYTES >= 2 * ALL_STATE_BYTES + 2 * STEP_BYTES ? 2 : 1;
  }
  __host__ __device__ static constexpr int stages(int arch) {
    if (!is_async(arch)) return 1;
    const int fit = (budget(arch) - FIXED_BYTES - buffers(arch) * ALL_STATE_BYTES) / STEP_BYTES;
    return fit > MAX_STAGES ? MAX_STAGES : fit > 1 ? fit : 1;
  }
  __host__ __device__ static constexpr int meeting_at(int arch) {
    if (!is_async(arch)) return FIXED_BYTES + (STEP_BYTES > ALL_STATE_BYTES ? STEP_BYTES : ALL_STATE_BYTES);
    return FIXED_BYTES + stages(arch) * STEP_BYTES + buffers(arch) * ALL_STATE_BYTES;
  }
  // `cluster_leaves`: most leaves of a sequence whose thread blocks meet in the first one's memory, where there are
  // clusters; one of them is that block's own.
  __host__ __device__ static constexpr int bytes(int arch, int cluster_leaves = 1) {
    return meeting_at(arch) + int(sizeof(DecodeMeeting)) + (cluster_leaves - 1) * STATE_BYTES;
  }
};

}  // namespace pagetide
