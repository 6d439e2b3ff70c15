// How lanes, warps, thread blocks and launches wait for each other, where that takes more than __syncthreads.
#pragma once

#include "primitives.cuh"

namespace pagetide {

// Adds one to a count in global memory; returns what it was. What this thread has written, or has seen written (by its
// thread block before a barrier), is visible to whoever counts later, and what the earlier ones had, to it.
__device__ __forceinline__ int32_t count_arrival(int32_t* count_gmem) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count_gmem) : "memory");
  return before;
}

// ---- launches that overlap (sm_90 and later)

// Waits until the launch before this one has ended and what it wrote is visible. Nothing that another kernel may
// write or still read is touched before, and none of it is read as constant (`__ldg`): this kernel began earlier.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets thread blocks of the next launch take the places that are free, where they wait.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- barriers in shared memory (sm_90 and later)

// Complete when `count` arrivals have come, and the bytes that they expect; then again for the next count. What a
// thread wrote before it arrived is seen behind the wait.
struct Barrier {
  uint64_t word;
};

__device__ __forceinline__ void init_barrier(Barrier& barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
#endif
}
// Lets a cluster's other thread blocks send to the barriers that this thread has begun.
__device__ __forceinline__ void show_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
#endif
}
__device__ __forceinline__ void arrive_expecting(Barrier& barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
#endif
}

// The arrival of a warp, once all its lanes have come here: that of one of them. `compute-sanitizer --tool racecheck`
// does not follow this, and takes what the other lanes did for unordered: for it `tests/sanitizer.py` lets all arrive.
constexpr int WARP_ARRIVALS = 1;
__device__ __forceinline__ void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % WARP < WARP_ARRIVALS) arrive(barrier);
}

// `parity`: of the number of times that the barrier had been complete before.
__device__ __forceinline__ void wait(Barrier& barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
#endif
}

// ---- clusters: thread blocks that write each other's shared memory (sm_90 and later)

// All threads of the cluster call both; behind the wait every block runs and has begun its barriers.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where the cluster's first thread block has what lies at an address of shared memory here.
__device__ __forceinline__ uint32_t in_first_block(uint32_t address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(address) : "r"(address));
#endif
  return address;
}
// Sends 16 or 8 bytes to the first block's shared memory and counts them at its barrier. That barrier makes them
// visible: a fence of the cluster, which waits for all that this thread wrote anywhere, is not needed.
__device__ __forceinline__ void send(uint32_t to, float4 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :
               : "r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void send(uint32_t to, float2 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
               :
               : "r"(to), "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
#endif
}

}  // namespace pagetide
