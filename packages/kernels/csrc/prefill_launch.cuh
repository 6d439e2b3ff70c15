// The launch of the prefill kernel for every architecture.
#pragma once

#include "attention_launch.cuh"
#include "prefill.cuh"

namespace pagetide {

template <typename T, typename KV, int HEAD_DIM>
void launch_prefill_instance(const AttentionParams& params, cudaStream_t stream) {
  using Tiles = PrefillTiles<T, KV, HEAD_DIM>;
  const int bytes = shared_bytes<prefill_kernel<Tiles>, Tiles::bytes>();
  const dim3 grid(params.num_kv_heads, params.num_items, (params.prefill_rows + Tiles::ROWS - 1) / Tiles::ROWS);
  prefill_kernel<Tiles><<<grid, Tiles::THREADS, bytes, stream>>>(params);
  check(cudaGetLastError(), "the launch of paged attention");
}

}  // namespace pagetide
