// Writing a step's keys and values to their slots, in the cache's dtype.
#include "launch.h"
#include "tile.cuh"

namespace pagetide {
namespace {

constexpr int WARPS = 8;  // of a thread block; each writes one token's row of K or V
constexpr float INT8_MAX_FLOAT = 127.0f;
constexpr int MAX_ELEMENTS = 256 / WARP;  // of a lane

// One side of the step: K or V.
template <typename T, typename C>
struct Side {
  const T* x;
  C* cache;
  float* scales;
  int64_t token_stride, head_stride;
  Strides strides, scale_strides;

  __device__ __forceinline__ Side(const StoreParams& p, bool is_v)
      : x(static_cast<const T*>(is_v ? p.v : p.k)),
        cache(static_cast<C*>(is_v ? p.v_cache : p.k_cache)),
        scales(is_v ? p.v_scales : p.k_scales),
        token_stride(is_v ? p.v_token_stride : p.k_token_stride),
        head_stride(is_v ? p.v_head_stride : p.k_head_stride),
        strides(is_v ? p.v_strides : p.k_strides),
        scale_strides(is_v ? p.v_scale_strides : p.k_scale_strides) {}

  __device__ __forceinline__ const T* row(int64_t token, int64_t head) const {
    return x + token * token_stride + head * head_stride;
  }
  __device__ __forceinline__ C* slot(int64_t block, int64_t head, int64_t offset) const {
    return cache + block * strides.block + head * strides.head + offset * strides.slot;
  }
  __device__ __forceinline__ float* scale(int64_t block, int64_t head, int64_t offset) const {
    return scales + block * scale_strides.block + head * scale_strides.head + offset * scale_strides.slot;
  }
};

// The larger of two magnitudes; NaN if either is: a model that computes NaN must not read plausible numbers back.
__device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }

__device__ __forceinline__ float warp_largest(float x) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    x = larger(x, __shfl_xor_sync(ALL_LANES, x, distance));
  }
  return x;
}

__device__ __forceinline__ int8_t quantize(float x, float scale) {
  const float rounded = rintf(__fdiv_rn(x, scale == 0.0f ? 1.0f : scale));
  return static_cast<int8_t>(fminf(fmaxf(rounded, -INT8_MAX_FLOAT), INT8_MAX_FLOAT));
}

// A warp a token and head; grid (tokens x heads / WARPS, K or V).
template <typename T, typename C>
__global__ void __launch_bounds__(WARPS* WARP) store_kernel(const __grid_constant__ StoreParams p) {
  const int lane = threadIdx.x % WARP;
  const int64_t index = int64_t{blockIdx.x} * WARPS + threadIdx.x / WARP;
  const int64_t token = index / p.num_heads;
  const int64_t head = index % p.num_heads;
  if (token >= __ldg(p.query_start_loc + p.num_seqs)) return;
  const Side<T, C> side(p, blockIdx.y == 1);
  const int64_t where = __ldg(p.slot_mapping + token);
  const int64_t block = where / p.block_size;
  const int64_t offset = where % p.block_size;
  const T* from = side.row(token, head);
  C* to = side.slot(block, head, offset);

  if constexpr (sizeof(C) > 1) {
    if (p.is_aligned) {
      struct alignas(4 * sizeof(T)) FromFour {
        T x[4];
      };
      struct alignas(4 * sizeof(C)) ToFour {
        C x[4];
      };
      for (int i = lane; i < p.head_dim / 4; i += WARP) {
        const FromFour four = reinterpret_cast<const FromFour*>(from)[i];
        ToFour stored;
#pragma unroll
        for (int j = 0; j < 4; ++j) stored.x[j] = from_float<C>(to_float(four.x[j]));
        reinterpret_cast<ToFour*>(to)[i] = stored;
      }
      return;
    }
    for (int i = lane; i < p.head_dim; i += WARP) to[i] = from_float<C>(to_float(from[i]));
  } else {
    float x[MAX_ELEMENTS];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_ELEMENTS; ++i) {
      const int column = lane + i * WARP;
      x[i] = column < p.head_dim ? to_float(from[column]) : 0.0f;
      largest = larger(fabsf(x[i]), largest);
    }
    const float scale = __fdiv_rn(warp_largest(largest), INT8_MAX_FLOAT);
    if (lane == 0) *side.scale(block, head, offset) = scale;
#pragma unroll
    for (int i = 0; i < MAX_ELEMENTS; ++i) {
      const int column = lane + i * WARP;
      if (column < p.head_dim) to[column] = quantize(x[i], scale);
    }
  }
}

// One scale a block and head. The first token of a block in this step writes all of them: a written block belongs
// to one sequence, so its tokens stand side by side. Earlier tokens are rounded again when the new ones widen the
// range; a block begun at its first slot holds none, so the scale of its earlier life counts for nothing.
template <typename T>
__global__ void __launch_bounds__(WARPS* WARP) store_block_scaled_kernel(const __grid_constant__ StoreParams p) {
  const int lane = threadIdx.x % WARP;
  const int64_t index = int64_t{blockIdx.x} * WARPS + threadIdx.x / WARP;
  const int64_t token = index / p.num_heads;
  const int64_t head = index % p.num_heads;
  const int64_t num_tokens = __ldg(p.query_start_loc + p.num_seqs);
  if (token >= num_tokens) return;
  const int64_t where = __ldg(p.slot_mapping + token);
  const int64_t block = where / p.block_size;
  if (token > 0 && __ldg(p.slot_mapping + token - 1) / p.block_size == block) return;
  const int num_held = int(where % p.block_size);
  int num_new = 1;
  while (num_held + num_new < p.block_size && token + num_new < num_tokens &&
         __ldg(p.slot_mapping + token + num_new) / p.block_size == block) {
    ++num_new;
  }

  const Side<T, int8_t> side(p, blockIdx.y == 1);
  float largest = 0.0f;
  for (int i = 0; i < num_new; ++i) {
    for (int column = lane; column < p.head_dim; column += WARP) {
      largest = larger(fabsf(to_float(side.row(token + i, head)[column])), largest);
    }
  }
  float scale = __fdiv_rn(warp_largest(largest), INT8_MAX_FLOAT);
  float* scale_at = side.scale(block, head, 0);
  if (num_held > 0) {
    const float old_scale = *scale_at;
    scale = larger(scale, old_scale);
    if (scale != old_scale) {
      for (int i = 0; i < num_held; ++i) {
        int8_t* to = side.slot(block, head, i);
        for (int column = lane; column < p.head_dim; column += WARP) {
          to[column] = quantize(to_float(to[column]) * old_scale, scale);
        }
      }
    }
  }
  __syncwarp();  // every lane has read the old scale
  if (lane == 0) *scale_at = scale;
  for (int i = 0; i < num_new; ++i) {
    int8_t* to = side.slot(block, head, num_held + i);
    for (int column = lane; column < p.head_dim; column += WARP) {
      to[column] = quantize(to_float(side.row(token + i, head)[column]), scale);
    }
  }
}

template <typename T>
void launch(const StoreParams& p, cudaStream_t stream) {
  const dim3 grid(unsigned((int64_t{p.num_tokens} * p.num_heads + WARPS - 1) / WARPS), 2);
  constexpr int THREADS = WARPS * WARP;
  if (p.is_block_scaled) return store_block_scaled_kernel<T><<<grid, THREADS, 0, stream>>>(p);
  switch (p.kv_dtype) {
    case DType::FLOAT32: return store_kernel<T, float><<<grid, THREADS, 0, stream>>>(p);
    case DType::FLOAT16: return store_kernel<T, Half><<<grid, THREADS, 0, stream>>>(p);
    case DType::BFLOAT16: return store_kernel<T, BFloat><<<grid, THREADS, 0, stream>>>(p);
    case DType::INT8: return store_kernel<T, int8_t><<<grid, THREADS, 0, stream>>>(p);
  }
}

}  // namespace

void launch_store(const StoreParams& params, cudaStream_t stream) {
  switch (params.dtype) {
    case DType::FLOAT32: launch<float>(params, stream); break;
    case DType::FLOAT16: launch<Half>(params, stream); break;
    default: launch<BFloat>(params, stream);
  }
  check(cudaGetLastError(), "the launch of store_kv");
}

}  // namespace pagetide
