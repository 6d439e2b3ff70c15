// The launchers: plain C++, no framework type. Each returns after queueing its work on `stream`.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "params.h"

namespace pagetide {

// A CUDA call that failed.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw CudaError(std::string(what) + ": " + cudaGetErrorString(status));
}

// What the work list is cut by. Rows and leaves are part of the arithmetic, so functions of the model's shape; how
// long the runs are is not.
struct WorkListParams {
  // [num_runs] where a thread block's work begins, [num_seqs + 1] where it may go on, then, if `prefill_items` is
  // null, the row tiles of sequences that do not decode.
  DecodeItem* decode_items;
  WorkItem* prefill_items;
  int32_t* arrivals;  // [num_arrivals], made zeros
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* rows;
  const int32_t* block_tables;
  int64_t table_stride;
  int32_t num_seqs, num_runs, decode_capacity, prefill_capacity, num_arrivals;
  int32_t group_size, block_shift;
  int32_t cluster_size;   // thread blocks of a sequence, if it has its own; else 1
  int32_t decode_rows;    // a sequence with no more rows decodes
  int32_t prefill_rows;   // rows of a tile of the others
  int32_t min_leaf_keys;   // a power of two times what a thread block takes in one step
  int32_t long_leaf_keys;  // a power of two times that
  int32_t few_leaves;      // enough for one short sequence to fill a fair part of the card
  int32_t max_leaves;
};
void make_work_list(const WorkListParams& params, cudaStream_t stream);

// What multiplies: tensor cores (`MmaEngine`) or CUDA cores (`SimtEngine`).
enum class Path : int { MMA, SIMT };

// The decode kernel with `params.num_items` thread blocks a KV head and row tile, the prefill kernel over that many
// items. `compiled_head_dim` is one that there is an instance of, at least the model's.
void launch_decode(const AttentionParams& params, Path path, int compiled_head_dim, cudaStream_t stream);
void launch_prefill(const AttentionParams& params, int compiled_head_dim, cudaStream_t stream);

// The instances behind them, explicitly instantiated, a file a kind and dtype, under `instances/`.
template <typename T, typename KV, int HEAD_DIM, int ROW_TILES>
struct MmaEngine;
template <typename T, int HEAD_DIM>
struct SimtEngine;
template <class Engine>
void launch_decode_instance(const AttentionParams& params, cudaStream_t stream);
template <typename T, typename KV, int HEAD_DIM>
void launch_prefill_instance(const AttentionParams& params, cudaStream_t stream);
// False, and nothing is queued, where the library has no sm_90a code for the current device, or where rows or strides
// are beyond what the kernel counts with.
template <typename T, typename KV, int HEAD_DIM>
bool launch_prefill_hopper_instance(const AttentionParams& params, cudaStream_t stream);

// The architecture (75, 80, ...) that the code running on the current device was compiled for.
int compiled_architecture();

struct StoreParams {
  const void* k;
  const void* v;
  void* k_cache;
  void* v_cache;
  float* k_scales;  // null unless the cache is INT8
  float* v_scales;
  const int64_t* slot_mapping;
  const int32_t* query_start_loc;
  int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  Strides k_strides, v_strides, k_scale_strides, v_scale_strides;
  int32_t num_tokens, num_seqs, num_heads, head_dim, block_size;
  DType dtype, kv_dtype;
  bool is_block_scaled;
  bool is_aligned;  // every row of k, v and the cache can be moved four elements at a time
};
void launch_store(const StoreParams& params, cudaStream_t stream);

// Copies blocks of `block_bytes` (a multiple of 4) within the device: of every plane, block `pairs[2 i]` to
// `pairs[2 i + 1]`. `pairs` is host memory, read before the call returns.
void launch_copy_blocks(const void* source, void* destination, int64_t source_plane_bytes,
                        int64_t destination_plane_bytes, int64_t block_bytes, int num_planes, const int32_t* pairs,
                        int num_pairs, cudaStream_t stream);

// The same between the device and the host (`kind` says which way); asynchronous if the host memory is pinned.
void swap_blocks(const void* source, void* destination, int64_t source_plane_bytes, int64_t destination_plane_bytes,
                 int64_t block_bytes, int num_planes, const int32_t* pairs, int num_pairs, bool to_host,
                 cudaStream_t stream);

}  // namespace pagetide
