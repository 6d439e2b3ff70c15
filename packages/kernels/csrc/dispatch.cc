// From a shape to the instance that serves it.
#include "launch.h"

namespace pagetide {
namespace {

using Launcher = void (*)(const AttentionParams&, cudaStream_t);

[[noreturn]] void refuse(int head_dim) {
  throw CudaError("no attention kernel was compiled for head_dim " + std::to_string(head_dim) + " and these dtypes");
}

// Rows of a head that do not fit eight columns of a product take a second eight.
template <typename T, typename KV, int HEAD_DIM>
Launcher mma_decode_rows(int num_rows) {
  return num_rows <= 8 ? launch_decode_instance<MmaEngine<T, KV, HEAD_DIM, 1>>
                       : launch_decode_instance<MmaEngine<T, KV, HEAD_DIM, 2>>;
}

template <typename T, typename KV>
Launcher mma_decode(int head_dim, int num_rows) {
  if (head_dim == 256) return launch_decode_instance<MmaEngine<T, KV, 256, 1>>;
  if (head_dim == 64) return mma_decode_rows<T, KV, 64>(num_rows);
  if (head_dim == 128) return mma_decode_rows<T, KV, 128>(num_rows);
  if constexpr (sizeof(KV) > 1) {
    if (head_dim == 80) return mma_decode_rows<T, KV, 80>(num_rows);
    if (head_dim == 96) return mma_decode_rows<T, KV, 96>(num_rows);
  }
  refuse(head_dim);
}

template <typename T>
Launcher mma_decode(const AttentionParams& params, int head_dim) {
  return params.kv_dtype == DType::INT8 ? mma_decode<T, int8_t>(head_dim, params.state_rows)
                                        : mma_decode<T, T>(head_dim, params.state_rows);
}

template <typename T>
Launcher simt_decode(int head_dim) {
  switch (head_dim) {
    case 64: return launch_decode_instance<SimtEngine<T, 64>>;
    case 128: return launch_decode_instance<SimtEngine<T, 128>>;
    case 256: return launch_decode_instance<SimtEngine<T, 256>>;
    default: refuse(head_dim);
  }
}

template <typename T, typename KV>
Launcher prefill(int head_dim) {
  switch (head_dim) {
    case 64: return launch_prefill_instance<T, KV, 64>;
    case 128: return launch_prefill_instance<T, KV, 128>;
    case 256: return launch_prefill_instance<T, KV, 256>;
  }
  if constexpr (sizeof(KV) > 1) {
    if (head_dim == 80) return launch_prefill_instance<T, KV, 80>;
    if (head_dim == 96) return launch_prefill_instance<T, KV, 96>;
  }
  refuse(head_dim);
}

// Warpgroup products, where they were compiled; their panels have 64 columns, so a head_dim of 80 or 96 has two.
template <typename T, typename KV>
bool prefill_hopper(const AttentionParams& params, cudaStream_t stream) {
  if (params.head_dim <= 64) return launch_prefill_hopper_instance<T, KV, 64>(params, stream);
  if (params.head_dim <= 128) return launch_prefill_hopper_instance<T, KV, 128>(params, stream);
  return false;
}

template <typename T, typename KV>
void launch_prefill_of(const AttentionParams& params, int head_dim, cudaStream_t stream) {
  if (!prefill_hopper<T, KV>(params, stream)) prefill<T, KV>(head_dim)(params, stream);
}

template <typename T>
void launch_prefill_of(const AttentionParams& params, int head_dim, cudaStream_t stream) {
  if (params.kv_dtype == DType::INT8) {
    launch_prefill_of<T, int8_t>(params, head_dim, stream);
  } else {
    launch_prefill_of<T, T>(params, head_dim, stream);
  }
}

Launcher decode_launcher(const AttentionParams& params, Path path, int head_dim) {
  if (path == Path::MMA) {
    return params.query_dtype == DType::FLOAT16 ? mma_decode<Half>(params, head_dim)
                                                : mma_decode<BFloat>(params, head_dim);
  }
  switch (params.kv_dtype) {
    case DType::FLOAT32: return simt_decode<float>(head_dim);
    case DType::FLOAT16: return simt_decode<Half>(head_dim);
    case DType::BFLOAT16: return simt_decode<BFloat>(head_dim);
    default: return simt_decode<int8_t>(head_dim);
  }
}

}  // namespace

void launch_decode(const AttentionParams& params, Path path, int compiled_head_dim, cudaStream_t stream) {
  decode_launcher(params, path, compiled_head_dim)(params, stream);
}

void launch_prefill(const AttentionParams& params, int compiled_head_dim, cudaStream_t stream) {
  if (params.query_dtype == DType::FLOAT16) {
    launch_prefill_of<Half>(params, compiled_head_dim, stream);
  } else {
    launch_prefill_of<BFloat>(params, compiled_head_dim, stream);
  }
}

}  // namespace pagetide
