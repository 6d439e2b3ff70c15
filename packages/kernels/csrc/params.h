// What the host hands to the kernels: plain data, no framework type.
#pragma once

#include <cstdint>

namespace pagetide {

// Half-precision elements: bits in memory, float32 in arithmetic.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

enum class DType : int { FLOAT32, FLOAT16, BFLOAT16, INT8 };

// A run of one sequence's leaves for a tile of its rows. Rows are the sequence's query tokens times the
// query heads of a KV head's group: token j, head h of the group, is row j * group_size + h.
struct alignas(64) WorkItem {
  int32_t sequence;     // -1: nothing to do
  int32_t table_row;    // of block_tables
  int32_t first_row;
  int32_t num_rows;
  int32_t first_leaf;
  int32_t num_leaves;   // of this run
  int32_t num_items;    // that share the sequence's leaves; 1: this one walks them all
  int32_t first_state;  // the sequence's first leaf's
  int32_t seq_len;
  int32_t query_len;
  int32_t first_token;
  int32_t leaf_shift;       // a leaf has 2^leaf_shift keys
  int32_t next;             // where the same thread block may find its next item; -1: nowhere
  int32_t num_step_tokens;  // of all sequences: tokens behind them are padding
  int32_t reserved[2];
};

// An item of the decode kernel: a word for each lane of a warp.
struct alignas(128) DecodeItem {
  WorkItem item;
  int32_t first_blocks[16];  // of the run's keys, to save a round trip
};
constexpr int ITEM_WORDS = sizeof(WorkItem) / 4;
constexpr int DECODE_ITEM_WORDS = sizeof(DecodeItem) / 4;
constexpr int ITEM_BLOCKS = DECODE_ITEM_WORDS - ITEM_WORDS;
static_assert(DECODE_ITEM_WORDS == 32, "a word a lane");

struct Strides {
  int64_t block, head, slot;
};

struct AttentionParams {
  void* out;
  const void* q;
  const void* k;
  const void* v;
  const float* k_scales;  // null unless the cache is INT8
  const float* v_scales;
  const WorkItem* items;            // of the prefill kernel
  const DecodeItem* decode_items;
  const int32_t* query_start_loc;
  const int32_t* block_tables;
  // Of leaves that several thread blocks share, a row tile of a KV head each.
  float* states;      // [states, num_kv_heads * row_tiles, state_rows, compiled head_dim]
  float* sums;        // [states, num_kv_heads * row_tiles, 2, state_rows]
  int32_t* arrivals;  // [num_seqs, num_kv_heads * row_tiles], zeros between launches
  int64_t out_token_stride, out_head_stride, q_token_stride, q_head_stride;
  Strides k_strides, v_strides, k_scale_strides, v_scale_strides;
  int64_t table_stride;
  int32_t num_seqs, num_tokens, num_items, num_kv_heads, group_size, head_dim, block_shift, state_rows;
  int32_t prefill_rows;  // prefill: most rows of an item
  int32_t num_runs;      // decode: items that begin a thread block's work; those behind them go on with it
  int32_t row_tiles;     // decode: tiles of rows that a KV head's group is cut into
  int32_t cluster_size;  // decode: thread blocks of one sequence that meet in shared memory; 1: in global memory
  int32_t cluster_leaves;  // decode: most leaves of a sequence whose blocks do
  int32_t window;  // 0: none
  float scale;
  float soft_cap;    // 0: none
  DType query_dtype;
  DType kv_dtype;
  // Of a cache whose strides fit 32 bits (`kv_plain`; it is aligned, too).
  uint32_t k_block_bytes, k_slot_bytes, v_block_bytes, v_slot_bytes, slot_mask;
  bool kv_plain;
  bool kv_aligned;   // every row of the cache starts at a multiple of 16 bytes
  bool q_aligned;    // the same of q
  bool out_aligned;  // the same of out
};

}  // namespace pagetide
