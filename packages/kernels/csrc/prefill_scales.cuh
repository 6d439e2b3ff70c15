// INT8 caches, for both prefill kernels: what the scales of a key and of its value do to the key's scores.
//
// The tensor cores multiply the whole numbers that are stored. A key's scale multiplies its scores. The scale c of its
// value goes into the exponent: with t = s + log2 c, and m the largest t,
//
//   w = 2^(t - m)      O = sum of w q      l = sum of w / c      and attention is O / l, as ever.
//
// So the weights lie where half precision has bits for them, between 0 and 1 (on Hopper, where m may lag, 2^8), however
// small or different the scales are, and a score costs one multiply-add more than that of a half-precision key.
#pragma once

#include "tile.cuh"

namespace pagetide {

// Of each key of a tile. With no soft cap, `factors` take a product to a score in log2 units.
template <int KEYS>
struct alignas(8) KeyTerms {
  float factors[KEYS], logs[KEYS], inverses[KEYS];  // of the key's scale; log2 and 1 / of the value's

  __device__ __forceinline__ void set(int key, float k_scale, float v_scale, const AttentionParams& p) {
    constexpr float LEAST = 0x1p-64f;  // of a value of zeros, whose key counts all the same; NaN stays NaN
    const float log = log2_approx(v_scale < LEAST ? LEAST : v_scale);
    factors[key] = p.soft_cap > 0.0f ? k_scale : k_scale * (p.scale * LOG2_E);
    logs[key] = log;
    inverses[key] = exp2_approx(-log);
  }

  // Those of a key and the next.
  __device__ __forceinline__ static float2 pair(const float (&terms)[KEYS], int key) {
    return *reinterpret_cast<const float2*>(terms + key);
  }
};

// Where the scale of a key is; `strides.slot` is 0 where a block has one.
__device__ __forceinline__ const float* scale_of(const float* scales, const Strides& strides, int kv_head, int block,
                                                 int slot) {
  return scales + block * strides.block + kv_head * strides.head + slot * strides.slot;
}

}  // namespace pagetide
