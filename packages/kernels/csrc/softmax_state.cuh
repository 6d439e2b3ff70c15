// The state of an online softmax, and the one way two states become one.
//
// Over a set of keys it is (m, l, acc): the largest score in log2 units, the sum of 2^(s - m), and the
// sum of 2^(s - m) v; over natural scores, e in place of 2. Attention is acc / l. Two states over disjoint
// keys merge by bringing both to the larger maximum (Milakov and Gimelshein 2018; Dao 2023). The main loops,
// the merge of a thread block's warps and the merge of a sequence's leaves all go through this file. Products
// and sums are spelt as intrinsics, because the compiler may otherwise fuse a different pair in each place, and
// the same tree of keys must give the same bits wherever it is walked.
#pragma once

#include "primitives.cuh"

namespace pagetide {

template <bool IS_NATURAL>
struct SumOf {
  float m, l;

  // Constructors, and not constexpr, in place of the members' defaults: where an array of arrays could be initialised by
  // constants, nvcc 13.0 gives them to the first array and zeros to the others.
  __device__ __forceinline__ SumOf() : SumOf(-INF) {}
  __device__ __forceinline__ explicit SumOf(float m) : m(m), l(0.0f) {}

  // What 2^(s - m) is taken against: a row that has seen no key has m = -inf, and -inf - (-inf) is NaN.
  __device__ __forceinline__ float base() const { return m == -INF ? 0.0f : m; }

  __device__ __forceinline__ float weight(float score) const {
    return exp2_approx(IS_NATURAL ? (score - base()) * LOG2_E : score - base());
  }

  // Brings the sum to a maximum of at least `score`; returns what acc must be multiplied by.
  __device__ __forceinline__ float raise(float score) {
    const float before = m;
    m = fmaxf(before, score);
    const float shrink = weight(before);
    l = __fmul_rn(l, shrink);
    return shrink;
  }
};

using SoftmaxSum = SumOf<false>;

template <int N, bool IS_NATURAL = false>
struct SoftmaxState : SumOf<IS_NATURAL> {
  using SumOf<IS_NATURAL>::l;
  static constexpr int SIZE = N;
  static constexpr int FLOATS = N + 2;
  float acc[N] = {};

  // The state over the keys of both, this one's before `later`'s.
  __device__ __forceinline__ void merge(const SoftmaxState& later) {
    const float shrink = this->raise(later.m);
    const float factor = this->weight(later.m);
    l = __fmaf_rn(later.l, factor, l);
#pragma unroll
    for (int i = 0; i < N; ++i) acc[i] = __fmaf_rn(later.acc[i], factor, __fmul_rn(acc[i], shrink));
  }

  // Attention; zeros for a row that saw no key.
  __device__ __forceinline__ float value(int i) const { return l == 0.0f ? 0.0f : acc[i] * __frcp_rn(l); }
};

}  // namespace pagetide
