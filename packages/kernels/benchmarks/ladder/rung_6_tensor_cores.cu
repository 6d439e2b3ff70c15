// Rung 6: all query heads of a KV head at once, as rows of a tensor-core product: each key is read once for the
// group, not once a head. The engine is the package's own (`decode_mma.cuh`); around it a fixed split of 128 keys,
// all of whose tiles are on their way at once. What the package adds is the work list, which cuts by keys and
// lets a thread block of a large batch walk many leaves.
#include "decode_mma.cuh"
#include "ladder.cuh"

namespace ladder {
namespace {

using namespace pagetide;
using Engine = MmaEngine<pagetide::Half, pagetide::Half, DIM, 1>;
constexpr int TILE = Engine::TILE;
constexpr int TILE_BYTES = TILE * Engine::Layout::ROW_BYTES;
constexpr int STEPS = SPLIT / (WARPS * TILE);
constexpr int ROWS = Engine::ROWS;  // heads of a group, at most
constexpr int STATE_FLOATS = ROWS * (DIM + 2);

__global__ void __launch_bounds__(THREADS) kernel(const __grid_constant__ AttentionParams p, const int* seq_lens) {
  __shared__ __align__(128) unsigned char tiles[WARPS][STEPS][2 * TILE_BYTES];
  __shared__ __align__(16) float states[WARPS][StateLayout<Engine>::FLOATS];
  __shared__ bool is_last;
  const int kv_head = blockIdx.x, sequence = blockIdx.y, split = blockIdx.z;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int num_keys = seq_lens[sequence];
  const int num_splits = (num_keys + SPLIT - 1) / SPLIT;
  if (split >= num_splits) return;
  WorkItem item{};
  item.num_rows = p.group_size;
  item.seq_len = num_keys;
  item.query_len = 1;
  item.first_token = sequence;

  // Every tile of the split sets off, then the queries.
  const int32_t* table = p.block_tables + sequence * p.table_stride;
  const auto* k = static_cast<const pagetide::Half*>(p.k) + kv_head * p.k_strides.head;
  const auto* v = static_cast<const pagetide::Half*>(p.v) + kv_head * p.v_strides.head;
  auto first_key = [&](int step) { return split * SPLIT + (step * WARPS + warp) * TILE; };
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int first = first_key(step);
    const int blocks = blocks_of_tile(table, first, num_keys, p.block_shift, TILE);
    load_tile<pagetide::Half, DIM, TILE, WARP>(tiles[warp][step], k, p.k_strides, blocks, first, num_keys,
                                               p.block_shift, DIM, true, lane);
    load_tile<pagetide::Half, DIM, TILE, WARP>(tiles[warp][step] + TILE_BYTES, v, p.v_strides, blocks, first,
                                               num_keys, p.block_shift, DIM, true, lane);
    commit_copies();
  }
  Engine engine(p, nullptr);
  engine.begin(item, kv_head);
  wait_copies<0>();
  __syncwarp();  // all lanes' parts of the warp's tiles have landed
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    engine.attend(shared_address(tiles[warp][step]), first_key(step), first_key(step) + TILE <= num_keys);
  }
  engine.share_state(states[warp]);
  __syncthreads();  // every warp's state is there
  const RowShare<Engine> share;
  RowShare<Engine>::State state;
  for (int w = 0; w < WARPS; ++w) state.merge(share.read(states[w], share.row));
  if (num_splits > 1) {
    const bool is_row = share.row < p.group_size;
    auto left_by = [&](int other) {
      return p.states + ((int64_t{sequence} * gridDim.z + other) * p.num_kv_heads + kv_head) * STATE_FLOATS;
    };
    float* mine = left_by(split);
    if (is_row) share.leave(state, mine + share.row, mine + ROWS + share.row, mine + 2 * ROWS + share.row * DIM);
    __threadfence();
    __syncthreads();  // every thread's state is visible to the card before one thread announces them
    if (threadIdx.x == 0) {
      int32_t* arrivals = p.arrivals + sequence * p.num_kv_heads + kv_head;
      is_last = atomicAdd(arrivals, 1) == num_splits - 1;
      if (is_last) *arrivals = 0;
    }
    __syncthreads();
    if (!is_last || !is_row) return;
    __threadfence();
    state = {};
    for (int other = 0; other < num_splits; ++other) {
      const float* m = left_by(other);
      state.merge(share.find(m + share.row, m + ROWS + share.row, m + 2 * ROWS + share.row * DIM));
    }
  }
  write_rows<Engine>(state, share, p, item, kv_head, share.row);
}

}  // namespace
}  // namespace ladder

RUNG rung_6_tensor_cores(const ladder::Args* a, cudaStream_t stream) {
  using ladder::DIM;
  if (a->num_heads > ladder::ROWS * a->num_kv_heads) return cudaErrorInvalidValue;
  pagetide::AttentionParams p{};
  p.out = a->out, p.q = a->q, p.k = a->k, p.v = a->v;
  p.block_tables = a->tables, p.table_stride = a->table_stride;
  p.states = a->states, p.arrivals = a->arrivals;
  p.q_token_stride = p.out_token_stride = int64_t{a->num_heads} * DIM;
  p.q_head_stride = p.out_head_stride = DIM;
  p.k_strides = p.v_strides = {int64_t{a->num_kv_heads} * ladder::BLOCK_SIZE * DIM, ladder::BLOCK_SIZE * DIM, DIM};
  p.num_seqs = a->num_seqs, p.num_kv_heads = a->num_kv_heads, p.group_size = a->num_heads / a->num_kv_heads;
  p.head_dim = DIM, p.block_shift = 4, p.scale = a->scale;
  p.query_dtype = p.kv_dtype = pagetide::DType::FLOAT16;
  p.kv_aligned = p.q_aligned = p.out_aligned = true;
  const dim3 grid(a->num_kv_heads, a->num_seqs, (a->max_seq_len + ladder::SPLIT - 1) / ladder::SPLIT);
  ladder::kernel<<<grid, ladder::THREADS, 0, stream>>>(p, a->seq_lens);
  return cudaGetLastError();
}
