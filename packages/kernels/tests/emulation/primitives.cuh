// Stands in for csrc/primitives.cuh where there is no GPU: a thread of the CPU is a lane, and what the lanes of a warp
// exchange goes through memory between two meetings of theirs.
//
// The kernels' own source runs on top of it, in the form that EMULATED_ARCH has. What it cannot show: what the CUDA
// compilers make of the source, how the hardware rounds within a product, and how weak its memory is.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __global__
#define __grid_constant__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#include "params.h"

using std::max;
using std::min;

// ---- a thread block

namespace emulation {

constexpr int MOST_WARPS = 4;
struct Warp {
  std::barrier<> meeting{32};
  alignas(16) unsigned char place[32][32];  // a lane's
};
extern Warp warps[MOST_WARPS];
extern std::barrier<>* block;
extern unsigned char* shared;
extern thread_local int thread;

inline Warp& warp() { return warps[thread / 32]; }
inline int lane() { return thread % 32; }

// `read` sees, by the lane's number, what each lane of the warp has given.
template <typename T, class Read>
auto exchange(const T& mine, Read read) {
  static_assert(sizeof(T) <= sizeof(Warp::place[0]));
  Warp& all = warp();
  std::memcpy(all.place[lane()], &mine, sizeof(T));
  all.meeting.arrive_and_wait();
  const auto result = read([&](int of_lane) {
    T theirs;
    std::memcpy(&theirs, all.place[of_lane], sizeof(T));
    return theirs;
  });
  all.meeting.arrive_and_wait();
  return result;
}

}  // namespace emulation

struct Index {
  struct Thread {
    operator int() const { return emulation::thread; }
  } x;
};
struct Extent {
  int x, y, z;
};
inline const Index threadIdx;
extern Extent blockIdx, blockDim;

// ---- what CUDA has

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { emulation::block->arrive_and_wait(); }
inline void __syncwarp() { emulation::warp().meeting.arrive_and_wait(); }
template <typename T>
T __shfl_sync(unsigned, T x, int lane) {
  return emulation::exchange(x, [&](auto of) { return of(lane & 31); });
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T x, int distance) {
  return __shfl_sync(lanes, x, emulation::lane() ^ distance);
}
inline bool __any_sync(unsigned, bool x) {
  return emulation::exchange(x, [&](auto of) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= of(i);
    return any;
  });
}

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcg(T* p, T x) {
  *p = x;
}

inline float __fmaf_rn(float x, float y, float z) { return std::fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t choices) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= uint32_t(bytes >> (choices >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return chosen;
}

namespace pagetide {

constexpr int COMPILED_ARCH = EMULATED_ARCH;
constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float INF = __builtin_huge_valf();

// ---- conversions

inline float to_float(float x) { return x; }
inline float to_float(Half x) { return float(__builtin_bit_cast(_Float16, x.bits)); }
inline float to_float(BFloat x) { return __uint_as_float(uint32_t{x.bits} << 16); }
inline float to_float(int8_t x) { return float(x); }

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Half from_float<Half>(float x) {
  return {__builtin_bit_cast(uint16_t, _Float16(x))};
}
template <>
inline BFloat from_float<BFloat>(float x) {
  const uint32_t bits = __float_as_uint(x);
  return {uint16_t(x != x ? 0x7fffu : bits + 0x7fffu + (bits >> 16 & 1u) >> 16)};
}

template <typename T>
uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | uint32_t{from_float<T>(high).bits} << 16;
}
inline float high_or_low(uint32_t word, int is_high, Half) { return to_float(Half{uint16_t(word >> 16 * is_high)}); }
inline float high_or_low(uint32_t word, int is_high, BFloat) {
  return to_float(BFloat{uint16_t(word >> 16 * is_high)});
}

inline void unpack(uint32_t word, float (&x)[1], float) { x[0] = __uint_as_float(word); }
template <typename T>
void unpack(uint32_t word, float (&x)[2], T) {
  for (int i = 0; i < 2; ++i) x[i] = high_or_low(word, i, T{});
}
inline void unpack(uint32_t word, float (&x)[4], int8_t) {
  for (int i = 0; i < 4; ++i) x[i] = float(int8_t(word >> 8 * i));
}

inline float exp2_approx(float x) { return std::exp2f(x); }
inline float log2_approx(float x) { return std::log2f(x); }

template <typename T, int I, int J>
struct Widen {
  static constexpr float BIAS = std::is_same_v<T, Half> ? 1024.0f + 128.0f : 0.0f;
  static uint32_t biased(uint32_t word) {
    return pack<T>(BIAS + int8_t(word >> 8 * I), BIAS + int8_t(word >> 8 * J));
  }
  static uint32_t pair(uint32_t word) { return pack<T>(int8_t(word >> 8 * I), int8_t(word >> 8 * J)); }
};

// ---- shared memory: an address is the distance from its beginning

inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - emulation::shared);
}
inline void* at_shared_address(uint32_t address) { return emulation::shared + address; }
template <typename T>
auto kept(T x) {
  return std::make_unsigned_t<T>(x);
}

// A copy has landed when it sets off; nothing is read that does not belong to it.
inline void copy_16_async(void* to_smem, const void* from, int bytes) {
  std::memset(to_smem, 0, 16);
  std::memcpy(to_smem, from, size_t(bytes));
}
inline void copy_16_async(uint32_t to_smem, const void* from) { copy_16_async(at_shared_address(to_smem), from, 16); }
inline void copy_4_async(void* to_smem, const void* from, bool is_there) {
  std::memset(to_smem, 0, 4);
  if (is_there) std::memcpy(to_smem, from, 4);
}
inline void commit_copies() {}
template <int N>
void wait_copies() {}

// ---- tensor cores: who holds what is said in csrc/primitives.cuh

template <bool IS_TRANSPOSED>
void load_rows(uint32_t (&x)[4], const void* row_smem) {
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  emulation::exchange(row_smem, [&](auto row_of) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int j = 0; j < 2; ++j) {
        const int row = IS_TRANSPOSED ? 2 * c + j : g, column = IS_TRANSPOSED ? g : 2 * c + j;
        std::memcpy(&pair[j], static_cast<const unsigned char*>(row_of(8 * matrix + row)) + 2 * column, 2);
      }
      x[matrix] = pair[0] | uint32_t{pair[1]} << 16;
    }
    return 0;
  });
}
inline void load_matrices(uint32_t (&x)[4], const void* row_smem) { load_rows<false>(x, row_smem); }
inline void load_matrices(uint32_t (&x)[4], uint32_t row_smem) { load_rows<false>(x, at_shared_address(row_smem)); }
inline void load_matrices_transposed(uint32_t (&x)[4], const void* row_smem) { load_rows<true>(x, row_smem); }
inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t row_smem) {
  load_rows<true>(x, at_shared_address(row_smem));
}

inline uint32_t transpose_matrix(uint32_t x) {
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  return emulation::exchange(x, [&](auto of) {
    const auto element = [&](int row, int column) { return of(4 * row + column / 2) >> 16 * (column % 2) & 0xffffu; };
    return element(2 * c, g) | element(2 * c + 1, g) << 16;
  });
}

// Sums in double, rounded once for each product of the hardware.
template <typename T>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  const int g = emulation::lane() / 4, c = emulation::lane() % 4;
  emulation::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [&](auto of) {
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i / 2), column = 2 * c + i % 2;
      double sum = d[i];
      for (int k = 0; k < 16; ++k) {
        const uint32_t left = of(4 * (row % 8) + k % 8 / 2).a[row / 8 + 2 * (k / 8)];
        const uint32_t right = of(4 * column + k % 8 / 2).b[k / 8];
        sum += double(high_or_low(left, k % 2, T{})) * double(high_or_low(right, k % 2, T{}));
        if (COMPILED_ARCH < 80 && k == 7) sum = float(sum);
      }
      d[i] = float(sum);
    }
    return 0;
  });
}

}  // namespace pagetide
