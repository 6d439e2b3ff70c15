// The producer of the Hopper prefill kernel: a warpgroup that copies, through the block table, as far ahead as there is
// room. It has few registers, and one warp of it on each scheduler must keep up with the tensor cores: addresses are
// a handful of instructions for every 16 rows.
#pragma once

#include "prefill_widening.cuh"

namespace pagetide {

// Starts the copy of a tile of keys or values by the producer; see `load_tile`, which places rows otherwise.
template <class Tiles>
__device__ __forceinline__ void load_panels(unsigned char* tile_smem, const typename Tiles::T* head_gmem,
                                            Strides strides, int blocks, int first_key, int end_key,
                                            const AttentionParams& p, int thread) {
  using T = typename Tiles::T;
  using Panel = Panels<Tiles::KEYS>;
  constexpr int ROWS_A_PASS = WARPGROUP / Panel::CHUNKS;
  const int chunk = thread % Panel::CHUNKS;
  const int first_row = thread / Panel::CHUNKS;
  const int slot_mask = (1 << p.block_shift) - 1;
  // The launcher has seen that these fit 32 bits: a product and a sum of 64 bits are then one instruction.
  const uint32_t block_bytes = uint32_t(strides.block * sizeof(T));
  const uint32_t slot_bytes = uint32_t(strides.slot * sizeof(T));
  unsigned char* to = tile_smem + Panel::offset(first_row, chunk);
  const char* from_column = reinterpret_cast<const char*>(head_gmem + chunk * 8);
  auto pass = [&](int first, auto copy) {
    const uint32_t block = __shfl_sync(ALL_LANES, blocks, (first_row + first) / 8);
    const uint32_t slot = (first_key + first_row + first) & slot_mask;
    const char* from = from_column + uint64_t(block) * block_bytes + slot * slot_bytes;
#pragma unroll
    for (int panel = 0; panel < HopperMemory<Tiles>::PANELS; ++panel) {
      copy(to + panel * Panel::BYTES + first * Panel::ROW_BYTES, from + panel * Panel::ROW_BYTES, panel);
    }
  };
  auto bytes_of = [&](int first, int panel) {
    return first_key + first_row + first < end_key && panel * 64 + chunk * 8 < p.head_dim ? 16 : 0;
  };
  if (!p.kv_aligned) {
#pragma unroll 1
    for (int first = 0; first < Tiles::KEYS; first += ROWS_A_PASS) {
      pass(first, [&](void* at, const void* from, int panel) {
        gather_chunk(at, static_cast<const T*>(from), bytes_of(first, panel));
      });
    }
  } else if (first_key + Tiles::KEYS <= end_key && p.head_dim == Tiles::DIM) {
#pragma unroll
    for (int first = 0; first < Tiles::KEYS; first += ROWS_A_PASS) {
      pass(first, [](void* at, const void* from, int) { copy_16_async(shared_address(at), from); });
    }
  } else {
#pragma unroll
    for (int first = 0; first < Tiles::KEYS; first += ROWS_A_PASS) {
      pass(first, [&](void* at, const void* from, int panel) { copy_16_async(at, from, bytes_of(first, panel)); });
    }
  }
}

template <class Tiles>
__device__ __forceinline__ void load_queries(unsigned char* q_smem, const WorkItem& item, int kv_head,
                                             const AttentionParams& p, int thread) {
  using T = typename Tiles::T;
  using Panel = Panels<HopperMemory<Tiles>::ROWS>;
  constexpr int ROWS_A_PASS = WARPGROUP / Panel::CHUNKS;
  const int chunk = thread % Panel::CHUNKS;
  const T* group_gmem = static_cast<const T*>(p.q) + item.first_token * p.q_token_stride +
                        int64_t(kv_head) * p.group_size * p.q_head_stride + chunk * 8;
  RowWalk walk(item.first_row + thread / Panel::CHUNKS, ROWS_A_PASS, p.group_size);
#pragma unroll 2
  for (int row = thread / Panel::CHUNKS; row < HopperMemory<Tiles>::ROWS; row += ROWS_A_PASS) {
    const T* from = group_gmem + walk.token * p.q_token_stride + walk.head * p.q_head_stride;
    walk.advance();
#pragma unroll
    for (int panel = 0; panel < HopperMemory<Tiles>::PANELS; ++panel) {
      const int bytes = row < item.num_rows && panel * 64 + chunk * 8 < p.head_dim ? 16 : 0;
      unsigned char* to = q_smem + Panel::offset(row, panel * 8 + chunk);
      const T* source = bytes ? from + panel * 64 : static_cast<const T*>(p.q);
      if (p.q_aligned) {
        copy_16_async(to, source, bytes);
      } else {
        gather_chunk(to, source, bytes);
      }
    }
  }
}

// Tells that this thread's part of a stage has landed, or will: chunks that were gathered are there already, and
// cross to the tensor cores' proxy here.
__device__ __forceinline__ void arrive_full(Barrier& full, bool is_copied) {
  if (is_copied) {
    arrive_after_copies(full);
  } else {
    fence_async_proxy();
    arrive(full);
  }
}

// Copies tiles of keys and values, one after the other, each when the stage that it goes to is free.
template <class Tiles>
struct TileCopier<Tiles, false> {
  using Memory = HopperMemory<Tiles>;
  using T = typename Tiles::T;
  const AttentionParams& p;
  unsigned char* smem;
  HopperShared<Tiles>& shared;
  const int thread;
  RingPlace<Tiles::STAGES> k_place, v_place;

  __device__ __forceinline__ void copy_keys(const HeadTile& tile) {
    copy(shared.keys, k_place, smem + Memory::K_AT, p.k, p.k_strides, tile);
  }
  __device__ __forceinline__ void copy_values(const HeadTile& tile) {
    copy(shared.values, v_place, smem + Memory::V_AT, p.v, p.v_strides, tile);
  }
  __device__ __forceinline__ void finish() {}  // nothing waits

 private:
  __device__ __forceinline__ void copy(RingBarriers<Tiles::STAGES>& ring, RingPlace<Tiles::STAGES>& place,
                                       unsigned char* ring_smem, const void* gmem, const Strides& strides,
                                       const HeadTile& tile) {
    wait(ring.empty[place.stage], place.parity ^ 1);
    load_panels<Tiles>(ring_smem + place.stage * Memory::TILE_BYTES,
                       static_cast<const T*>(gmem) + tile.kv_head * strides.head, strides, tile.blocks, tile.first_key,
                       tile.end_key, p, thread);
    arrive_full(ring.full[place.stage], p.kv_aligned);
    place.advance();
  }
};

// The producer's life: jobs, an item for one KV head each, in turn from the last of the list (a sequence's last tokens
// see the most keys). After its first, a thread block draws them as it comes to them; a step's draws are as many as its
// jobs, as every block draws once in vain, so the last one knows to put the counter back.
template <class Tiles>
__device__ __forceinline__ void produce(const AttentionParams& p, unsigned char* smem, HopperShared<Tiles>& shared) {
  using Memory = HopperMemory<Tiles>;
  constexpr int KEYS = Tiles::KEYS;
  const int thread = threadIdx.x % WARPGROUP;
  const int num_items = shared.num_items;
  const int num_jobs = num_items * p.num_kv_heads;
  const int num_blocks = min(int(gridDim.x), num_jobs);
  RingPlace<Memory::QUERY_STAGES> q_place;
  TileCopier<Tiles> copier{p, smem, shared, thread};

  // What a job starts with, read while the last tile of the one before waits for its place.
  int job = blockIdx.x;
  WorkItem item{};
  int next_blocks = 0;
  auto blocks_of = [&](const KeyRange<KEYS>& range, const int32_t* table, int tile) {
    return tile < range.begin_tile ? 0 : blocks_of_tile(table, tile * KEYS, range.end_key, p.block_shift, KEYS);
  };
  auto table_of_item = [&]() { return p.block_tables + item.table_row * p.table_stride; };
  auto read_item = [&]() {
    if (job >= num_jobs) return;
    item = p.items[num_items - 1 - job / p.num_kv_heads];
    const KeyRange<KEYS> range(item, p);
    next_blocks = blocks_of(range, table_of_item(), range.end_tile - 1);
  };
  read_item();
  for (int turn = 0; job < num_jobs; turn ^= 1) {
    int drawn = 0;
    if (thread == 0) drawn = atomicAdd(p.arrivals, 1);
    const int kv_head = job % p.num_kv_heads;
    const KeyRange<KEYS> range(item, p);
    const int32_t* table = table_of_item();

    wait(shared.queries.empty[q_place.stage], q_place.parity ^ 1);  // the job that used this stage is written
    load_queries<Tiles>(smem + q_place.stage * Memory::QUERY_BYTES, item, kv_head, p, thread);
    if (thread == 0) {
      shared.jobs[q_place.stage] = {item, kv_head};
      arrive(shared.queries.full[q_place.stage]);
    }
    arrive_full(shared.queries.full[q_place.stage], p.q_aligned);
    q_place.advance();

    int later_blocks = 0;
    for (int tile = range.end_tile - 1; tile >= range.begin_tile - 1; --tile) {  // its keys, the one before's values
      const int tile_blocks = next_blocks;
      if (tile >= range.begin_tile) {
        next_blocks = blocks_of(range, table, tile - 1);
        copier.copy_keys({kv_head, tile_blocks, tile * KEYS, range.end_key});
      } else {
        if (thread == 0) {
          shared.next_job[turn] = num_blocks + drawn;
          if (drawn == num_jobs - 1) *p.arrivals = 0;
        }
        sync_named(HopperNamed<Tiles>::PRODUCER, WARPGROUP);  // it is there; the one before has been read
        job = shared.next_job[turn];
        read_item();
      }
      if (tile + 1 < range.end_tile) copier.copy_values({kv_head, later_blocks, (tile + 1) * KEYS, range.end_key});
      later_blocks = tile_blocks;
    }
  }
  copier.finish();

  wait(shared.queries.empty[q_place.stage], q_place.parity ^ 1);
  if (thread == 0) {
    shared.jobs[q_place.stage].item.sequence = -1;
    arrive(shared.queries.full[q_place.stage]);
  }
  arrive(shared.queries.full[q_place.stage]);
  commit_copies();
  wait_copies<0>();  // none may be on its way when the thread ends
}

}  // namespace pagetide
