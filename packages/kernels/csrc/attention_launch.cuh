// Launching an instance of an attention kernel: its shared memory depends on what was really compiled, so the code
// that runs on this device is asked, not the device's name.
#pragma once

#include <mutex>

#include "launch.h"

namespace pagetide {

// What `ASK` says about the current device; it is asked once for each.
template <class Facts, Facts (*ASK)(int device)>
Facts facts_of_device() {
  constexpr int MAX_DEVICES = 64;
  static std::mutex mutex;
  static bool is_known[MAX_DEVICES] = {};
  static Facts facts[MAX_DEVICES] = {};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= MAX_DEVICES) throw CudaError("a device index of 64 or more");
  const std::lock_guard<std::mutex> lock(mutex);
  if (!is_known[device]) {
    facts[device] = ASK(device);
    is_known[device] = true;
  }
  return facts[device];
}

template <void (*KERNEL)(AttentionParams), int (*BYTES)(int)>
int allow_shared_bytes(int) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, KERNEL), "no code for this device in the compiled library");
  const int needed = BYTES(attributes.ptxVersion);
  check(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, needed),
        "shared memory of an attention kernel");
  check(cudaFuncSetAttribute(KERNEL, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "the shared memory carve-out of an attention kernel");
  return needed;
}

// Bytes of shared memory of a kernel on the current device; the first call there allows the kernel that many.
template <void (*KERNEL)(AttentionParams), int (*BYTES)(int)>
int shared_bytes() {
  return facts_of_device<int, allow_shared_bytes<KERNEL, BYTES>>();
}

}  // namespace pagetide
