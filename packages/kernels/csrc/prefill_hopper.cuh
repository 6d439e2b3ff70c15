// Prefill on Hopper: the loop of `prefill.cuh`, by warpgroups with roles (Shah et al. 2024, FlashAttention-3).
//
// A thread block stays on its multiprocessor and walks items. One warpgroup, the producer, copies queries, keys and
// values to shared memory, through the table, as far ahead as there is room. The others, the consumers, have 64 rows
// each. While the tensor cores do P V of one tile and Q K^T of the next, a consumer has no work; so the products of
// one are ordered before the other's, and each computes its exponentials while the other multiplies.
//
//   consumer:  S = Q K[j]^T and O += P V[j+1] queued together; S is there first: its maxima are found while P V
//              still runs; then O *= 2^((m - m') c), if any m has changed, and P = 2^(S c - m' c)
//
// Tiles are walked from the last to the first, so that the masked ones come first.
#pragma once

#include "attention_launch.cuh"
#include "prefill_consumer.cuh"
#include "prefill_producer.cuh"

namespace pagetide {

template <class Tiles>
__global__ void __launch_bounds__(HopperMemory<Tiles>::THREADS, 1)
    prefill_hopper_kernel(const __grid_constant__ AttentionParams p) {
#if PAGETIDE_HOPPER
  using Memory = HopperMemory<Tiles>;
  extern __shared__ unsigned char dynamic_smem[];
  __shared__ HopperShared<Tiles> shared;
  unsigned char* smem = dynamic_smem + (-shared_address(dynamic_smem) & (Memory::ALIGNMENT - 1));

  // Items beyond the step's own say -1; the first one behind them is its number.
  for (int i = threadIdx.x; i < p.num_items; i += Memory::THREADS) {
    const bool is_last = p.items[i].sequence >= 0 && (i + 1 == p.num_items || p.items[i + 1].sequence < 0);
    if (is_last) shared.num_items = i + 1;
    if (i == 0 && p.items[0].sequence < 0) shared.num_items = 0;
  }
  if (threadIdx.x == 0) {
    auto init = [](Barrier* full, Barrier* empty, int stages, int producers) {
      for (int i = 0; i < stages; ++i) {
        init_barrier(full[i], producers);
        init_barrier(empty[i], Tiles::CONSUMERS * WARPGROUP / WARP * WARP_ARRIVALS);
      }
    };
    init(shared.queries.full, shared.queries.empty, Memory::QUERY_STAGES, WARPGROUP + 1);  // and once for the job
    init(shared.keys.full, shared.keys.empty, Tiles::STAGES, WARPGROUP);
    init(shared.values.full, shared.values.empty, Tiles::STAGES, WARPGROUP);
    fence_async_proxy();
  }
  __syncthreads();  // the barriers and the number of items are there
  if (threadIdx.x < WARPGROUP) {
    give_registers<Tiles::PRODUCER_REGISTERS>();
    produce<Tiles>(p, smem, shared);
  } else {
    take_registers<Tiles::CONSUMER_REGISTERS>();
    consume<Tiles>(p, smem, shared);
  }
#endif
}

// Other architectures' kernels have no body, and so no shared memory of their own: 0 multiprocessors then.
template <void (*KERNEL)(AttentionParams)>
int multiprocessors_of(int device) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, KERNEL), "no code for this device in the compiled library");
  if (attributes.sharedSizeBytes == 0) return 0;
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "the number of multiprocessors");
  return count;
}

// Whether a block's and a slot's bytes fit 32 bits, as `load_panels` multiplies.
inline bool is_compact(const Strides& strides, int64_t element_bytes, int block_shift) {
  constexpr int64_t LIMIT = int64_t{1} << 31;
  return strides.block * element_bytes < LIMIT && (strides.slot * element_bytes << block_shift) < LIMIT;
}

template <typename T, typename KV, int HEAD_DIM>
bool launch_prefill_hopper_instance(const AttentionParams& params, cudaStream_t stream) {
  using Tiles = HopperTiles<T, KV, HEAD_DIM>;
  using Memory = HopperMemory<Tiles>;
  const int multiprocessors = facts_of_device<int, multiprocessors_of<prefill_hopper_kernel<Tiles>>>();
  const bool is_served = multiprocessors > 0 && params.prefill_rows <= Memory::ROWS &&
                         is_compact(params.k_strides, sizeof(KV), params.block_shift) &&
                         is_compact(params.v_strides, sizeof(KV), params.block_shift);
  if (!is_served) return false;
  const int bytes = shared_bytes<prefill_hopper_kernel<Tiles>, Memory::bytes>();
  const int jobs = params.num_items * params.num_kv_heads;
  const int blocks = jobs < multiprocessors ? jobs : multiprocessors;
  prefill_hopper_kernel<Tiles><<<blocks, Memory::THREADS, bytes, stream>>>(params);
  check(cudaGetLastError(), "the launch of paged attention");
  return true;
}

}  // namespace pagetide
