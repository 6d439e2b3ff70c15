// What the roles of the Hopper prefill kernel share: tile sizes, shared memory, the rings between them, a job's keys.
#pragma once

#include "hopper.cuh"
#include "prefill_scales.cuh"

namespace pagetide {

template <typename ELEMENT, typename STORED, int HEAD_DIM>
struct HopperTiles {
  using T = ELEMENT;  // of queries, outputs and products
  using KV = STORED;  // of the cache: T, or int8_t, which the producer widens
  static constexpr bool IS_QUANTIZED = sizeof(KV) == 1;
  static constexpr int DIM = HEAD_DIM;
  static constexpr int KEYS = DIM <= 64 ? 96 : 128;
  static constexpr int CONSUMERS = DIM <= 64 ? 3 : 2;  // warpgroups
  static constexpr int STAGES = DIM <= 64 ? 3 : 2;  // of the rings of keys and of values
  static constexpr bool TAKES_TURNS = true;
  static constexpr int PRODUCER_REGISTERS = IS_QUANTIZED && DIM > 64 ? 88 : 56;
  static constexpr int CONSUMER_REGISTERS = DIM <= 64 ? 152 : IS_QUANTIZED ? 208 : 224;
};

// Rows of DIM elements in panels of 64 columns; a panel's rows are 128 bytes, their chunks permuted as the tensor
// cores expect it.
template <int ROWS>
struct Panels {
  static constexpr int ROW_BYTES = 128;
  static constexpr int BYTES = ROWS * ROW_BYTES;  // of a panel
  static constexpr int CHUNKS = 8;                // of a panel's row
  __device__ static __forceinline__ int offset(int row, int chunk) {
    return chunk / CHUNKS * BYTES + row * ROW_BYTES + ((chunk % CHUNKS) ^ (row % 8)) * 16;
  }
};

template <class Tiles>
struct HopperMemory {
  static constexpr int ROWS = 64 * Tiles::CONSUMERS;
  static constexpr int THREADS = WARPGROUP * (1 + Tiles::CONSUMERS);
  static constexpr int PANELS = Tiles::DIM / 64;
  static constexpr int QUERY_STAGES = 2;
  static constexpr int QUERY_BYTES = PANELS * Panels<ROWS>::BYTES;
  static constexpr int TILE_BYTES = PANELS * Panels<Tiles::KEYS>::BYTES;
  static constexpr int ALIGNMENT = 1024;  // eight rows of a panel
  static constexpr int K_AT = QUERY_STAGES * QUERY_BYTES;
  static constexpr int V_AT = K_AT + Tiles::STAGES * TILE_BYTES;
  __host__ __device__ static constexpr int bytes(int) { return ALIGNMENT + V_AT + Tiles::STAGES * TILE_BYTES; }
};

// What a producer tells the consumers about the item whose queries it copies.
struct HopperJob {
  WorkItem item;  // sequence -1: there are no more
  int kv_head;
};

// `full` completes when a stage's data has landed, `empty` when all consumers have used it.
template <int STAGES>
struct RingBarriers {
  Barrier full[STAGES], empty[STAGES];
};

template <class Tiles>
struct HopperShared {
  RingBarriers<HopperMemory<Tiles>::QUERY_STAGES> queries;
  RingBarriers<Tiles::STAGES> keys, values;
  // INT8: of the keys' stages and one more, so that a place is free again with the stage of the tile behind it.
  static constexpr int TERMS = Tiles::IS_QUANTIZED ? Tiles::STAGES + 1 : 1;
  KeyTerms<Tiles::KEYS> terms[TERMS];
  HopperJob jobs[HopperMemory<Tiles>::QUERY_STAGES];
  int next_job[2];
  int num_items;
};

// The numbers of the named barriers.
template <class Tiles>
struct HopperNamed {
  static constexpr int TURN = 1;                          // a consumer's turn to multiply, one each
  static constexpr int GROUP = TURN + Tiles::CONSUMERS;   // a consumer's warps alone
  static constexpr int PRODUCER = GROUP + Tiles::CONSUMERS;
};

// A place in a ring. The parity is that of the stage's uses, the one to wait for in `full`.
template <int STAGES>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The keys that an item's rows see, and their tiles.
template <int KEYS>
struct KeyRange {
  int offset, first_position, last_position, end_key, begin_tile, end_tile;
  KeyRange() = default;
  __device__ __forceinline__ KeyRange(const WorkItem& item, const AttentionParams& p) {
    offset = item.seq_len - item.query_len;
    first_position = offset + item.first_row / p.group_size;
    last_position = offset + (item.first_row + item.num_rows - 1) / p.group_size;
    end_key = max(0, last_position + 1);
    begin_tile = p.window > 0 ? max(0, first_position - p.window + 1) / KEYS : 0;
    end_tile = max(1, (end_key + KEYS - 1) / KEYS);  // a tile of no keys where a row sees none
  }
};

// Some of a KV head's keys, or their values, that make a tile; `blocks` is `blocks_of_tile`'s.
struct HeadTile {
  int kv_head, blocks, first_key, end_key;
};

// What copies tiles: in `prefill_producer.cuh`, of INT8 in `prefill_widening.cuh`.
template <class Tiles, bool IS_QUANTIZED = Tiles::IS_QUANTIZED>
struct TileCopier;

// A row of a job as a token and a head of its group, from one row to the next `step` rows further.
struct RowWalk {
  int token, head;
  int step_tokens, step_heads, group_size;
  __device__ __forceinline__ RowWalk(int row, int step, int group_size)
      : token(row / group_size),
        head(row % group_size),
        step_tokens(step / group_size),
        step_heads(step % group_size),
        group_size(group_size) {}
  __device__ __forceinline__ void advance() {
    token += step_tokens;
    head += step_heads;
    if (head >= group_size) {
      head -= group_size;
      ++token;
    }
  }
};

}  // namespace pagetide
