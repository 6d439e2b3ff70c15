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
  WorkItem* decode_items;
  WorkItem* prefill_items;  // null: those rows go to the decode kernel, as items of their own behind its others
  int32_t* arrivals;  // [num_seqs, num_kv_heads], made zeros
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* rows;
  int32_t num_seqs, decode_capacity, prefill_capacity;
  int32_t group_size, num_kv_heads;
  int32_t decode_rows;    // rows of a decode tile: a sequence with no more decodes
  int32_t prefill_rows;   // rows of a prefill tile
  int32_t min_leaf_keys;   // a power of two times what a thread block takes in one step
  int32_t long_leaf_keys;  // a power of two times that
  int32_t few_leaves;      // enough for one short sequence to fill a fair part of the card
  int32_t max_leaves;
  int32_t target_blocks;  // thread blocks that fill the card
};
void make_work_list(const WorkListParams& params, cudaStream_t stream);

// What multiplies: tensor cores (`MmaEngine`) or CUDA cores (`SimtEngine`).
enum class Path : int { MMA, SIMT };

// The decode and prefill kernels over `params.num_items` items of each KV head. `compiled_head_dim` is one that
// there is an instance of, at least the model's.
void launch_decode(const AttentionParams& params, Path path, int compiled_head_dim, cudaStream_t stream);
void launch_prefill(const AttentionParams& params, int compiled_head_dim, cudaStream_t stream);

// The instances behind them, explicitly instantiated, a file a kind and dtype, under `instances/`.
template <typename T, int HEAD_DIM>
struct MmaEngine;
template <typename T, int HEAD_DIM>
struct SimtEngine;
template <class Engine>
void launch_decode_instance(const AttentionParams& params, cudaStream_t stream);
template <typename T, int HEAD_DIM>
void launch_prefill_instance(const AttentionParams& params, cudaStream_t stream);
// False, and nothing is queued, where the library has no sm_90a code for the current device.
template <typename T, int HEAD_DIM>
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
