// The instructions: asynchronous copies, matrix fragments, tensor-core products, conversions.
//
// Inline assembly and architecture tests are here, in `barriers.cuh` and, of what only Hopper has, in `hopper.cuh`.
// Everything above is written once: below sm_80 an asynchronous copy is a plain vector load and store, and a k16
// product is two k8 ones.
#pragma once

#include <cstdint>

#include "params.h"

namespace pagetide {

#ifdef __CUDA_ARCH__
constexpr int COMPILED_ARCH = __CUDA_ARCH__ / 10;
#else
constexpr int COMPILED_ARCH = 0;
#endif
constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float INF = __builtin_huge_valf();

// ---- conversions

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(BFloat x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(int8_t x) { return static_cast<float>(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  Half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ BFloat from_float<BFloat>(float x) {
  // Round to nearest even in integers, which every architecture has; NaN stays NaN.
  const uint32_t bits = __float_as_uint(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return BFloat{static_cast<uint16_t>(x != x ? 0x7fffu : rounded >> 16)};
}

// Two values in one register, `low` in the low half: an operand of a tensor-core product.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<Half>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return from_float<Half>(low).bits | static_cast<uint32_t>(from_float<Half>(high).bits) << 16;
#endif
}
template <>
__device__ __forceinline__ uint32_t pack<BFloat>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return from_float<BFloat>(low).bits | static_cast<uint32_t>(from_float<BFloat>(high).bits) << 16;
#endif
}

// The elements of a 32-bit word as floats.
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[1], float) {
  x[0] = __uint_as_float(word);
}
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[2], Half) {
  x[0] = to_float(Half{static_cast<uint16_t>(word)});
  x[1] = to_float(Half{static_cast<uint16_t>(word >> 16)});
}
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[2], BFloat) {
  x[0] = __uint_as_float(word << 16);
  x[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[4], int8_t) {
  // Each byte, made unsigned, under the exponent of 2^23 is the float 2^23 + byte: exact, and no
  // conversion instruction, of which the hardware has few.
  const uint32_t biased = word ^ 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two of a word's four INT8 elements, those at bytes I and J, as a pair of T plus BIAS. A byte, made unsigned, under
// the exponent of 2^10 is the half 1024 + byte: exact, and no conversion. bfloat16 has too few digits for that.
template <typename T, int I, int J>
struct Widen;
template <int I, int J>
struct Widen<Half, I, J> {
  static constexpr float BIAS = 1024.0f + 128.0f;
  __device__ static __forceinline__ uint32_t biased(uint32_t word) {
    return __byte_perm(word ^ 0x80808080u, 0x64646464u, 0x4040 + J * 0x100 + I);
  }
  __device__ static __forceinline__ uint32_t pair(uint32_t word) {
    uint32_t y;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(y) : "r"(biased(word)), "r"(0x64806480u));
    return y;
  }
};
// A byte's lower seven bits under the exponent of 2^7 are 128 + these; 128, or 256 of a negative one, goes off again.
template <int I, int J>
struct Widen<BFloat, I, J> {
  static constexpr float BIAS = 0.0f;
  __device__ static __forceinline__ uint32_t pair(uint32_t word) {
    uint32_t y = 0;
#if __CUDA_ARCH__ >= 800
    const uint32_t biased = __byte_perm(word, 0x43434343u, 0x4040 + J * 0x100 + I);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(y)
        : "r"(biased & 0xff7fff7fu), "r"(0x3f803f80u), "r"((biased & 0xff80ff80u) | 0x80008000u));  // times 1
#endif  // sm_75 has no bfloat16 arithmetic: the back end refuses the dtype there
    return y;
  }
  __device__ static __forceinline__ uint32_t biased(uint32_t word) { return pair(word); }
};

// ---- shared memory

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void* at_shared_address(uint32_t address) {
  return reinterpret_cast<void*>(__cvta_shared_to_generic(address));
}

// A value that the compiler cannot compute anew and so keeps in a register.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ uint64_t kept(uint64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Copies `bytes` (0 to 16) from global to shared memory and fills up to 16 with zeros. Nothing beyond
// `bytes` is read: it may be another sequence's, or NaN. Both addresses are multiples of 16, and
// `bytes` is a multiple of the element's size.
__device__ __forceinline__ void copy_16_async(void* to_smem, const void* from_gmem, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to_smem)),
               "l"(from_gmem), "r"(bytes)
               : "memory");
#else
  uint4 value = make_uint4(0, 0, 0, 0);
  if (bytes == 16) {
    value = __ldg(static_cast<const uint4*>(from_gmem));
  } else if (bytes > 0) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < bytes) words[i / 4] |= uint32_t(static_cast<const uint8_t*>(from_gmem)[i]) << (i % 4 * 8);
    }
    value = make_uint4(words[0], words[1], words[2], words[3]);
  }
  *static_cast<uint4*>(to_smem) = value;
#endif
}

// All 16 of them, to an address of shared memory.
__device__ __forceinline__ void copy_16_async(uint32_t to_smem, const void* from_gmem) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_smem), "l"(from_gmem) : "memory");
#else
  const uint4 x = __ldg(static_cast<const uint4*>(from_gmem));
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to_smem), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
#endif
}

// The same for one 32-bit word, or zero.
__device__ __forceinline__ void copy_4_async(void* to_smem, const void* from_gmem, bool is_there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to_smem)), "l"(from_gmem),
               "r"(is_there ? 4 : 0)
               : "memory");
#else
  *static_cast<uint32_t*>(to_smem) = is_there ? __ldg(static_cast<const uint32_t*>(from_gmem)) : 0;
#endif
}

// Ends a group of asynchronous copies; each thread counts its own.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the youngest `N` of this thread's groups are still on their way.
template <int N>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- tensor cores

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 and
// receives, of each matrix, row l / 4, columns 2 (l % 4) and the next.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row_smem)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], const void* row_smem) {
  load_matrices(x, shared_address(row_smem));
}

// The same, each matrix transposed on its way.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row_smem)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], const void* row_smem) {
  load_matrices_transposed(x, shared_address(row_smem));
}

// An 8x8 matrix of 16-bit elements, transposed across the warp: lane l holds row l / 4, columns 2 (l % 4) and the
// next, before and after.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// d += a b for a 16x16, b 16x8, float32 sums. With g = lane / 4 and c = lane % 4, a holds rows g, g + 8,
// g, g + 8 at columns 2c and, in its upper two, 2c + 8; b holds rows 2c and 2c + 8 of column g; d holds
// row g, columns 2c and 2c + 1, then row g + 8.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void multiply_add<Half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

template <>
__device__ __forceinline__ void multiply_add<BFloat>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif  // sm_75 has no bfloat16 product: the back end refuses the dtype there
}

}  // namespace pagetide
