// The attention kernels on the CPU, a thread block at a time, for `test_emulated.py`.

#include <thread>
#include <vector>

#include "decode_mma.cuh"
#include "decode_simt.cuh"
#include "prefill.cuh"

namespace emulation {
Warp warps[MOST_WARPS];
std::barrier<>* block;
unsigned char* shared;
thread_local int thread;
}  // namespace emulation
Extent blockIdx, blockDim;

namespace pagetide {
namespace {

// A call's tensors and sizes. Caches are [blocks, heads, slots, head_dim], scales [blocks, heads, slots].
struct Problem {
  void *out, *q, *k, *v;
  float *k_scales, *v_scales;
  void* items;
  int32_t* block_tables;
  float *states, *sums;
  int32_t* arrivals;
  int32_t num_items, num_runs, num_seqs, num_tokens, num_kv_heads, group_size, head_dim, block_size;
  int32_t table_width, window, query_dtype, kv_dtype, state_rows;
  float scale, soft_cap;
};

AttentionParams params_of(const Problem& problem) {
  AttentionParams p{};
  p.out = problem.out, p.q = problem.q, p.k = problem.k, p.v = problem.v;
  p.k_scales = problem.k_scales, p.v_scales = problem.v_scales;
  p.items = static_cast<const WorkItem*>(problem.items);
  p.decode_items = static_cast<const DecodeItem*>(problem.items);
  p.block_tables = problem.block_tables;
  p.states = problem.states, p.sums = problem.sums, p.arrivals = problem.arrivals;
  const int64_t head = problem.head_dim, slots = problem.block_size;
  p.out_head_stride = p.q_head_stride = head;
  p.out_token_stride = p.q_token_stride = problem.num_kv_heads * problem.group_size * head;
  p.k_strides = p.v_strides = {problem.num_kv_heads * slots * head, slots * head, head};
  p.k_scale_strides = p.v_scale_strides = {problem.num_kv_heads * slots, slots, 1};
  p.table_stride = problem.table_width;
  p.num_seqs = problem.num_seqs, p.num_tokens = problem.num_tokens;
  p.num_items = problem.num_items, p.num_runs = problem.num_runs;
  p.num_kv_heads = problem.num_kv_heads, p.group_size = problem.group_size, p.head_dim = problem.head_dim;
  for (p.block_shift = 0; 1 << p.block_shift < problem.block_size;) ++p.block_shift;
  p.state_rows = problem.state_rows;
  p.row_tiles = p.cluster_size = p.cluster_leaves = 1;
  p.window = problem.window, p.scale = problem.scale, p.soft_cap = problem.soft_cap;
  p.query_dtype = DType(problem.query_dtype), p.kv_dtype = DType(problem.kv_dtype);
  const int bytes[] = {4, 2, 2, 1};
  p.slot_mask = uint32_t(problem.block_size - 1);
  p.k_slot_bytes = p.v_slot_bytes = uint32_t(head * bytes[problem.kv_dtype]);
  p.k_block_bytes = p.v_block_bytes = uint32_t(problem.num_kv_heads * slots * p.k_slot_bytes);
  p.kv_plain = p.kv_aligned = p.q_aligned = p.out_aligned = true;
  return p;
}

// Thread blocks one after the other; shared memory begins as NaN.
template <void (*KERNEL)(AttentionParams)>
void run(const AttentionParams& p, Extent grid, int threads, int bytes) {
  std::vector<unsigned char> memory(size_t(bytes) + 128);
  emulation::shared = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 127);
  blockDim = {threads, 1, 1};
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        std::memset(memory.data(), 0xff, memory.size());
        std::barrier<> meeting(threads);
        emulation::block = &meeting;
        std::vector<std::thread> lanes;
        for (int i = 0; i < threads; ++i) {
          lanes.emplace_back([&p, i] {
            emulation::thread = i;
            KERNEL(p);
            emulation::block->arrive_and_drop();
          });
        }
        for (std::thread& each : lanes) each.join();
      }
    }
  }
}

template <class Engine>
void decode(const AttentionParams& p) {
  run<decode_kernel<Engine>>(p, {p.num_items, p.num_kv_heads, 1}, Engine::WARPS * WARP,
                             DecodeMemory<Engine>::bytes(COMPILED_ARCH));
}
template <class Tiles>
void prefill(const AttentionParams& p) {
  run<prefill_kernel<Tiles>>(p, {p.num_kv_heads, p.num_items, 1}, Tiles::THREADS, Tiles::bytes(COMPILED_ARCH));
}

template <int DIM>
bool decode_of(const AttentionParams& p) {
  const bool is_long = p.state_rows > 8;
  if (p.query_dtype == DType::FLOAT16 && p.kv_dtype == DType::FLOAT16) {
    is_long ? decode<MmaEngine<Half, Half, DIM, 2>>(p) : decode<MmaEngine<Half, Half, DIM, 1>>(p);
  } else if (p.query_dtype == DType::FLOAT16 && p.kv_dtype == DType::INT8) {
    is_long ? decode<MmaEngine<Half, int8_t, DIM, 2>>(p) : decode<MmaEngine<Half, int8_t, DIM, 1>>(p);
  } else if (p.query_dtype == DType::FLOAT32 && p.kv_dtype == DType::FLOAT32) {
    decode<SimtEngine<float, DIM>>(p);
  } else if (p.query_dtype == DType::FLOAT32 && p.kv_dtype == DType::INT8) {
    decode<SimtEngine<int8_t, DIM>>(p);
  } else {
    return false;
  }
  return true;
}
template <int DIM>
bool prefill_of(const AttentionParams& p) {
  if (p.query_dtype != DType::FLOAT16) return false;
  p.kv_dtype == DType::INT8 ? prefill<PrefillTiles<Half, int8_t, DIM>>(p) : prefill<PrefillTiles<Half, Half, DIM>>(p);
  return true;
}

}  // namespace
}  // namespace pagetide

// Whether there is such a kernel here.
extern "C" bool emulate(const pagetide::Problem* problem, bool is_prefill) {
  const pagetide::AttentionParams p = pagetide::params_of(*problem);
  if (p.head_dim <= 64) return is_prefill ? pagetide::prefill_of<64>(p) : pagetide::decode_of<64>(p);
  return is_prefill ? pagetide::prefill_of<128>(p) : pagetide::decode_of<128>(p);
}
