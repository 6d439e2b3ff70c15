// Hopper's own instructions (sm_90a): warpgroup products, barriers in shared memory, registers by role.
//
// A warpgroup is four consecutive warps. Its products run beside it: what they read and write, registers as well as
// shared memory, is theirs from the fence before them to the wait behind them. They read shared memory as the
// asynchronous proxy, so data that ordinary instructions or cp.async wrote there passes `fence_async_proxy` first.
#pragma once

#include "barriers.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PAGETIDE_HOPPER 1
#else
#define PAGETIDE_HOPPER 0
#endif

namespace pagetide {

constexpr int WARPGROUP = 128;

// Arrives when this thread's asynchronous copies so far have landed; the thread itself goes on.
__device__ __forceinline__ void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The hardware's numbered barriers, for whole warps; 0 is __syncthreads'.
__device__ __forceinline__ void sync_named(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- registers, of a whole warpgroup

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- products of a warpgroup

// An operand in shared memory as rows of 128 bytes whose chunks of 16 are permuted by the row, chunk ^ row % 8, in
// groups of eight rows; its address is a multiple of 1024. `leading` and `stride` in bytes, see the design page:
// of an operand whose rows run along the product's sum, `stride` leads from eight rows to the next eight; of a
// transposed one, from eight of the sum to the next eight, and `leading` from 64 columns to the next 64.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t SWIZZLE_128 = 1ull << 62;
  return SWIZZLE_128 | uint64_t(stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | ((address & 0x3ffffu) >> 4);
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving uses of registers that a product writes or reads across this place.
template <int N>
__device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Waits until at most the youngest `N` committed groups of products are running.
template <int N>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define PAGETIDE_F8(d, i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define PAGETIDE_F32(d, i) PAGETIDE_F8(d, i), PAGETIDE_F8(d, i + 8), PAGETIDE_F8(d, i + 16), PAGETIDE_F8(d, i + 24)
#define PAGETIDE_F64(d, i) PAGETIDE_F32(d, i), PAGETIDE_F32(d, i + 32)
#define PAGETIDE_LIST_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define PAGETIDE_F48(d, i) PAGETIDE_F32(d, i), PAGETIDE_F8(d, i + 32), PAGETIDE_F8(d, i + 40)
#define PAGETIDE_LIST_48 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47}"
#define PAGETIDE_LIST_64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
  "%59, %60, %61, %62, %63}"

// d = a b (+ d): a 64 x 16 and b 16 x 2 SIZE, float32 sums. Warp w of the group has rows 16 w to 16 w + 15, a lane of
// it for every 8 columns the four sums that `multiply_add` says, and of `a` in registers what it says too.
// Both in shared memory, rows along the sum: a [64, 16], b [2 SIZE, 16].
template <typename T, int SIZE>
__device__ __forceinline__ void multiply_group(float (&d)[SIZE], uint64_t a, uint64_t b, bool is_added);
// a in registers, b [16, 2 SIZE], transposed on its way.
template <typename T, int SIZE>
__device__ __forceinline__ void multiply_group(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b);

#define PAGETIDE_MULTIPLY_GROUP(T, TYPE, SIZE, N, LIST, SUMS, A, B, ADDED, A0, A1, A2, A3, B4, B5)                    \
  template <>                                                                                                       \
  __device__ __forceinline__ void multiply_group<T, SIZE>(float (&d)[SIZE], uint64_t a, uint64_t b,                 \
                                                          bool is_added) {                                          \
    asm volatile("{\n.reg .pred added;\nsetp.ne.b32 added, " ADDED ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " " LIST ", " A ", " B              \
                 ", added, 1, 1, 0, 0;\n}\n"                                                                        \
                 : SUMS(d, 0)                                                                                       \
                 : "l"(a), "l"(b), "r"(int(is_added)));                                                             \
  }                                                                                                                 \
  template <>                                                                                                       \
  __device__ __forceinline__ void multiply_group<T, SIZE>(float (&d)[SIZE], const uint32_t (&a)[4], uint64_t b) {   \
    asm volatile("{\n.reg .pred added;\nsetp.ne.b32 added, " B5 ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " " LIST ", {" A0 ", " A1 ", " A2   \
                 ", " A3 "}, " B4 ", added, 1, 1, 1;\n}\n"                                                          \
                 : SUMS(d, 0)                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                     \
  }
#define PAGETIDE_MULTIPLY_GROUPS(T, TYPE)                                                                           \
  PAGETIDE_MULTIPLY_GROUP(T, TYPE, 32, "64", PAGETIDE_LIST_32, PAGETIDE_F32, "%32", "%33", "%34", "%32", "%33",     \
                          "%34", "%35", "%36", "%37")                                                               \
  PAGETIDE_MULTIPLY_GROUP(T, TYPE, 48, "96", PAGETIDE_LIST_48, PAGETIDE_F48, "%48", "%49", "%50", "%48", "%49",     \
                          "%50", "%51", "%52", "%53")                                                               \
  PAGETIDE_MULTIPLY_GROUP(T, TYPE, 64, "128", PAGETIDE_LIST_64, PAGETIDE_F64, "%64", "%65", "%66", "%64", "%65",    \
                          "%66", "%67", "%68", "%69")
PAGETIDE_MULTIPLY_GROUPS(Half, "f16")
PAGETIDE_MULTIPLY_GROUPS(BFloat, "bf16")
#undef PAGETIDE_MULTIPLY_GROUPS
#undef PAGETIDE_MULTIPLY_GROUP
#undef PAGETIDE_LIST_64
#undef PAGETIDE_LIST_48
#undef PAGETIDE_F48
#undef PAGETIDE_LIST_32
#undef PAGETIDE_F64
#undef PAGETIDE_F32
#undef PAGETIDE_F8

}  // namespace pagetide
