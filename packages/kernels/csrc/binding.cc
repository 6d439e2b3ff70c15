// The library's functions as Python sees them, through apache-tvm-ffi: tensors in, typed errors out.
//
// Python has validated shapes and strides against the contract (`ops.py`); what is checked here is what would
// otherwise be undefined behaviour: a tensor of another dtype, rank or device.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "launch.h"

namespace {

using namespace pagetide;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

const DLDataType INT32{kDLInt, 32, 1};
const DLDataType INT64{kDLInt, 64, 1};
const DLDataType FLOAT32{kDLFloat, 32, 1};

bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

void require(const char* name, const TensorView& x, int ndim, DLDataType dtype) {
  if (x.device().device_type != kDLCUDA) {
    TVM_FFI_THROW(ValueError) << name << " is not on a CUDA device: move it there, or use the 'cpu' back end";
  }
  if (x.ndim() != ndim) TVM_FFI_THROW(ValueError) << name << " has " << x.ndim() << " dimensions, not " << ndim;
  if (!same(x.dtype(), dtype)) TVM_FFI_THROW(TypeError) << name << " has another dtype than the kernel reads";
}

DType dtype_of(const char* name, const TensorView& x) {
  const DLDataType dtype = x.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32) return DType::FLOAT32;
  if (dtype.code == kDLFloat && dtype.bits == 16) return DType::FLOAT16;
  if (dtype.code == kDLBfloat && dtype.bits == 16) return DType::BFLOAT16;
  if (dtype.code == kDLInt && dtype.bits == 8) return DType::INT8;
  TVM_FFI_THROW(TypeError) << name << " is neither float32, float16, bfloat16 nor int8";
}

// Makes the tensors' device the current one, and puts the caller's back.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int device_;
  int before_ = 0;
};

// Runs `body(stream)` on the tensor's device and the caller's current stream; a failed CUDA call becomes Python's
// RuntimeError.
template <typename Body>
void run_on(const TensorView& tensor, Body body) {
  const DLDevice device = tensor.device();
  try {
    const DeviceScope scope(device.device_id);
    body(static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id)));
  } catch (const CudaError& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

Strides strides_of(const TensorView& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

// Whether every row of a tensor starts at a multiple of `bytes`.
bool rows_aligned(const TensorView& x, int bytes) {
  const int64_t element = x.dtype().bits / 8;
  int64_t all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data_ptr()));
  for (int i = 0; i + 1 < x.ndim(); ++i) all |= x.size(i) > 1 ? x.stride(i) * element : 0;
  return all % bytes == 0;
}

// Whether the strides of blocks and slots, in bytes, fit 32 bits, the latter times the slots of a block.
bool strides_fit(const TensorView& x) {
  const int64_t element = x.dtype().bits / 8;
  return x.stride(0) * element < (int64_t{1} << 32) && x.stride(2) * element < (int64_t{1} << 24);
}

int log2_of(int64_t value) {
  int shift = 0;
  while ((int64_t{1} << shift) < value) ++shift;
  if ((int64_t{1} << shift) != value || value < 8) {
    TVM_FFI_THROW(ValueError) << "block_size=" << value << " is not a power of two of at least 8";
  }
  return shift;
}

template <class Item>
Item* items_of(const char* name, const TensorView& x) {
  require(name, x, 2, INT32);
  if (x.size(1) * 4 != int64_t{sizeof(Item)}) {
    TVM_FFI_THROW(ValueError) << name << " must have " << sizeof(Item) / 4 << " words an item";
  }
  return static_cast<Item*>(x.data_ptr());
}

void work_list(TensorView decode_items, TensorView prefill_items, TensorView arrivals, TensorView query_start_loc,
               TensorView seq_lens, TensorView rows, TensorView block_tables, int64_t block_size, int64_t group_size,
               int64_t num_runs, int64_t cluster_size, int64_t decode_rows, int64_t prefill_rows,
               bool has_prefill_kernel, int64_t min_leaf_keys, int64_t long_leaf_keys, int64_t few_leaves,
               int64_t max_leaves) {
  require("arrivals", arrivals, 2, INT32);
  require("query_start_loc", query_start_loc, 1, INT32);
  require("seq_lens", seq_lens, 1, INT32);
  require("rows", rows, 1, INT32);
  require("block_tables", block_tables, 2, INT32);
  WorkListParams p{};
  p.decode_items = items_of<DecodeItem>("decode_items", decode_items);
  p.prefill_items = items_of<WorkItem>("prefill_items", prefill_items);
  if (!has_prefill_kernel) p.prefill_items = nullptr;
  p.arrivals = static_cast<int32_t*>(arrivals.data_ptr());
  p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data_ptr());
  p.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  p.rows = static_cast<const int32_t*>(rows.data_ptr());
  p.block_tables = static_cast<const int32_t*>(block_tables.data_ptr());
  p.table_stride = block_tables.stride(0);
  p.num_seqs = int32_t(seq_lens.size(0));
  p.num_runs = int32_t(num_runs);
  p.decode_capacity = int32_t(decode_items.size(0));
  p.prefill_capacity = p.prefill_items ? int32_t(prefill_items.size(0)) : 0;
  p.num_arrivals = int32_t(arrivals.size(0) * arrivals.size(1));
  p.group_size = int32_t(group_size);
  p.block_shift = log2_of(block_size);
  p.cluster_size = int32_t(cluster_size);
  p.decode_rows = int32_t(decode_rows);
  p.prefill_rows = int32_t(prefill_rows);
  p.min_leaf_keys = int32_t(min_leaf_keys);
  p.long_leaf_keys = int32_t(long_leaf_keys);
  p.few_leaves = int32_t(few_leaves);
  p.max_leaves = int32_t(max_leaves);
  run_on(seq_lens, [&](cudaStream_t stream) { make_work_list(p, stream); });
}

void paged_attention(TensorView out, TensorView q, TensorView k, TensorView v, Optional<TensorView> k_scales,
                     Optional<TensorView> v_scales, TensorView decode_items, TensorView prefill_items,
                     TensorView query_start_loc, TensorView block_tables, TensorView states, TensorView sums,
                     TensorView arrivals, double scale, double soft_cap, int64_t window, int64_t path,
                     int64_t decode_head_dim, int64_t prefill_head_dim, int64_t prefill_rows, int64_t num_runs,
                     int64_t row_tiles, int64_t cluster_size, int64_t cluster_leaves) {
  require("out", out, 3, q.dtype());
  require("k_cache", k, 4, k.dtype());
  require("v_cache", v, 4, k.dtype());
  require("q", q, 3, q.dtype());
  require("query_start_loc", query_start_loc, 1, INT32);
  require("block_tables", block_tables, 2, INT32);
  require("states", states, 4, FLOAT32);
  require("sums", sums, 4, FLOAT32);
  require("arrivals", arrivals, 2, INT32);
  AttentionParams p{};
  p.out = out.data_ptr();
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  p.query_dtype = dtype_of("q", q);
  p.kv_dtype = dtype_of("k_cache", k);
  if (p.kv_dtype == DType::INT8) {
    if (!k_scales.has_value() || !v_scales.has_value()) {
      TVM_FFI_THROW(ValueError) << "an int8 cache needs k_scales and v_scales";
    }
    require("k_scales", k_scales.value(), 3, FLOAT32);
    require("v_scales", v_scales.value(), 3, FLOAT32);
    p.k_scales = static_cast<const float*>(k_scales.value().data_ptr());
    p.v_scales = static_cast<const float*>(v_scales.value().data_ptr());
    p.k_scale_strides = strides_of(k_scales.value());
    p.v_scale_strides = strides_of(v_scales.value());
  }
  p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data_ptr());
  p.block_tables = static_cast<const int32_t*>(block_tables.data_ptr());
  p.states = static_cast<float*>(states.data_ptr());
  p.sums = static_cast<float*>(sums.data_ptr());
  p.arrivals = static_cast<int32_t*>(arrivals.data_ptr());
  p.out_token_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  p.q_token_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.k_strides = strides_of(k);
  p.v_strides = strides_of(v);
  p.table_stride = block_tables.stride(0);
  p.num_seqs = int32_t(query_start_loc.size(0) - 1);
  p.num_tokens = int32_t(q.size(0));
  p.num_kv_heads = int32_t(k.size(1));
  p.group_size = int32_t(q.size(1) / k.size(1));
  p.head_dim = int32_t(q.size(2));
  p.block_shift = log2_of(k.size(2));
  p.state_rows = int32_t(states.size(2));
  p.prefill_rows = int32_t(prefill_rows);
  p.num_runs = int32_t(num_runs);
  p.row_tiles = int32_t(row_tiles);
  p.cluster_size = int32_t(cluster_size);
  p.cluster_leaves = int32_t(cluster_leaves);
  p.window = int32_t(window);
  p.scale = float(scale);
  p.soft_cap = float(soft_cap);
  p.kv_aligned = rows_aligned(k, 16) && rows_aligned(v, 16);
  p.slot_mask = (1u << p.block_shift) - 1;
  p.k_block_bytes = uint32_t(k.stride(0) * (k.dtype().bits / 8));
  p.k_slot_bytes = uint32_t(k.stride(2) * (k.dtype().bits / 8));
  p.v_block_bytes = uint32_t(v.stride(0) * (k.dtype().bits / 8));
  p.v_slot_bytes = uint32_t(v.stride(2) * (k.dtype().bits / 8));
  p.kv_plain = p.kv_aligned && strides_fit(k) && strides_fit(v);
  p.q_aligned = rows_aligned(q, 16);
  p.out_aligned = rows_aligned(out, 16);
  run_on(q, [&](cudaStream_t stream) {
    p.decode_items = items_of<DecodeItem>("decode_items", decode_items);
    p.num_items = int32_t(decode_items.size(0)) - p.num_seqs - 1;  // those between are where blocks go on
    launch_decode(p, static_cast<Path>(path), int(decode_head_dim), stream);
    if (prefill_items.size(0) > 0) {
      p.items = items_of<WorkItem>("prefill_items", prefill_items);
      p.num_items = int32_t(prefill_items.size(0));
      launch_prefill(p, int(prefill_head_dim), stream);
    }
  });
}

void store_kv(TensorView k, TensorView v, TensorView k_cache, TensorView v_cache, Optional<TensorView> k_scales,
              Optional<TensorView> v_scales, TensorView slot_mapping, TensorView query_start_loc,
              bool is_block_scaled) {
  require("k", k, 3, k.dtype());
  require("v", v, 3, k.dtype());
  require("k_cache", k_cache, 4, k_cache.dtype());
  require("v_cache", v_cache, 4, k_cache.dtype());
  require("slot_mapping", slot_mapping, 1, INT64);
  require("query_start_loc", query_start_loc, 1, INT32);
  StoreParams p{};
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  p.k_cache = k_cache.data_ptr();
  p.v_cache = v_cache.data_ptr();
  p.dtype = dtype_of("k", k);
  p.kv_dtype = dtype_of("k_cache", k_cache);
  if (p.kv_dtype == DType::INT8) {
    if (!k_scales.has_value() || !v_scales.has_value()) {
      TVM_FFI_THROW(ValueError) << "an int8 cache needs k_scales and v_scales";
    }
    require("k_scales", k_scales.value(), 3, FLOAT32);
    require("v_scales", v_scales.value(), 3, FLOAT32);
    p.k_scales = static_cast<float*>(k_scales.value().data_ptr());
    p.v_scales = static_cast<float*>(v_scales.value().data_ptr());
    p.k_scale_strides = strides_of(k_scales.value());
    p.v_scale_strides = strides_of(v_scales.value());
  }
  p.slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr());
  p.query_start_loc = static_cast<const int32_t*>(query_start_loc.data_ptr());
  p.k_token_stride = k.stride(0);
  p.k_head_stride = k.stride(1);
  p.v_token_stride = v.stride(0);
  p.v_head_stride = v.stride(1);
  p.k_strides = strides_of(k_cache);
  p.v_strides = strides_of(v_cache);
  p.num_tokens = int32_t(k.size(0));
  p.num_seqs = int32_t(query_start_loc.size(0) - 1);
  p.num_heads = int32_t(k.size(1));
  p.head_dim = int32_t(k.size(2));
  p.block_size = int32_t(k_cache.size(2));
  p.is_block_scaled = is_block_scaled;
  const int input_bytes = k.dtype().bits / 2;  // of four elements
  const int cache_bytes = k_cache.dtype().bits / 2;
  p.is_aligned = p.head_dim % 4 == 0 && rows_aligned(k, input_bytes) && rows_aligned(v, input_bytes) &&
                 rows_aligned(k_cache, cache_bytes) && rows_aligned(v_cache, cache_bytes);
  run_on(k, [&](cudaStream_t stream) { launch_store(p, stream); });
}

// `source` and `destination` are [planes, blocks, bytes], contiguous within a block; `pairs` int32 [copies, 2] in
// host memory.
void copy_blocks(TensorView source, TensorView destination, TensorView pairs) {
  const bool from_device = source.device().device_type == kDLCUDA;
  const bool to_device = destination.device().device_type == kDLCUDA;
  if (!from_device && !to_device) {
    TVM_FFI_THROW(ValueError) << "both pools are in host memory: use the 'cpu' back end for those";
  }
  if (source.ndim() != 3 || destination.ndim() != 3 || source.size(2) != destination.size(2) ||
      source.size(0) != destination.size(0)) {
    TVM_FFI_THROW(ValueError) << "the pools differ in layers or in the size of a block";
  }
  if (pairs.device().device_type == kDLCUDA || !same(pairs.dtype(), INT32) || pairs.ndim() != 2) {
    TVM_FFI_THROW(ValueError) << "pairs must be int32 [copies, 2] in host memory";
  }
  const int planes = int(source.size(0));
  const int count = int(pairs.size(0));
  const auto* ids = static_cast<const int32_t*>(pairs.data_ptr());
  run_on(from_device ? source : destination, [&](cudaStream_t stream) {
    if (from_device && to_device) {
      launch_copy_blocks(source.data_ptr(), destination.data_ptr(), source.stride(0), destination.stride(0),
                         source.size(2), planes, ids, count, stream);
    } else {
      swap_blocks(source.data_ptr(), destination.data_ptr(), source.stride(0), destination.stride(0), source.size(2),
                  planes, ids, count, from_device, stream);
    }
  });
}

int64_t architecture(int64_t device) {
  try {
    const DeviceScope scope{int(device)};
    return compiled_architecture();
  } catch (const CudaError& error) {
    TVM_FFI_THROW(RuntimeError) << error.what();
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(work_list, work_list);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, paged_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_kv, store_kv);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_blocks, copy_blocks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(architecture, architecture);
