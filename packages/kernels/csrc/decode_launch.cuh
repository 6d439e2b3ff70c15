// The launch of the decode kernel, whatever its engine.
#pragma once

#include "attention_launch.cuh"
#include "decode.cuh"

namespace pagetide {

struct DecodeFacts {
  int architecture;  // that the kernel was compiled for
  int multiprocessors;
  int shared_bytes;      // of a multiprocessor
  int own_shared_bytes;  // of a thread block that are not dynamic
  int most_dynamic;      // shared bytes of a thread block
};

template <class Engine>
DecodeFacts decode_facts(int device) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, decode_kernel<Engine>), "no code for this device in the compiled library");
  auto ask = [&](cudaDeviceAttr what) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, what, device), "cudaDeviceGetAttribute");
    return value;
  };
  const int own = int(attributes.sharedSizeBytes) + ask(cudaDevAttrReservedSharedMemoryPerBlock);
  const int most = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin) - int(attributes.sharedSizeBytes);
  check(cudaFuncSetAttribute(decode_kernel<Engine>, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
        "shared memory of an attention kernel");
  check(cudaFuncSetAttribute(decode_kernel<Engine>, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "the shared memory carve-out of an attention kernel");
  return {attributes.ptxVersion, ask(cudaDevAttrMultiProcessorCount),
          ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor), own, most};
}

// Thread blocks in clusters where the work list has cut them so; where the hardware can, they take their places while
// the launch before ends. A multiprocessor that has come free early would take more than its share of them: so each
// asks for as much shared memory as leaves no room for that.
template <class Engine>
void launch_decode_instance(const AttentionParams& params, cudaStream_t stream) {
  using Memory = DecodeMemory<Engine>;
  const DecodeFacts facts = facts_of_device<DecodeFacts, decode_facts<Engine>>();
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(params.num_items), unsigned(params.num_kv_heads), unsigned(params.row_tiles));
  config.blockDim = dim3(Engine::WARPS * WARP);
  int bytes = Memory::bytes(facts.architecture, params.cluster_size > 1 ? params.cluster_leaves : 1);
  const int64_t blocks = int64_t{params.num_items} * params.num_kv_heads * params.row_tiles;
  const int64_t an_sm = (blocks + facts.multiprocessors - 1) / facts.multiprocessors;
  const int64_t share = facts.shared_bytes / an_sm / 1024 * 1024 - facts.own_shared_bytes;
  if (share > bytes) bytes = int(share < facts.most_dynamic ? share : facts.most_dynamic);
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (facts.architecture >= 90) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (params.cluster_size > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(params.cluster_size);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  check(cudaLaunchKernelEx(&config, decode_kernel<Engine>, params), "the launch of paged attention");
}

}  // namespace pagetide
