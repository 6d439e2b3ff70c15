// A consumer of the Hopper prefill kernel: a warpgroup that multiplies and keeps the online softmax of 64 rows.
#pragma once

#include "prefill_hopper_tiles.cuh"
#include "softmax_state.cuh"

namespace pagetide {

constexpr float MOST_GROWTH = 8.0f;  // m follows a row's scores when they outgrow it by more, in log2 units

// A consumer's life: the items that the producer sends.
template <class Tiles>
__device__ __forceinline__ void consume(const AttentionParams& p, unsigned char* smem, HopperShared<Tiles>& shared) {
  using T = typename Tiles::T;
  using Memory = HopperMemory<Tiles>;
  using QueryPanel = Panels<Memory::ROWS>;
  using KeyPanel = Panels<Tiles::KEYS>;
  constexpr int KEYS = Tiles::KEYS;
  constexpr int DIM = Tiles::DIM;
  constexpr bool IS_QUANTIZED = Tiles::IS_QUANTIZED;
  using Named = HopperNamed<Tiles>;
  const int group = __shfl_sync(ALL_LANES, threadIdx.x / WARPGROUP, 0) - 1;  // the compiler sees one for all lanes
  const int warp = threadIdx.x % WARPGROUP / WARP;
  const int lane = threadIdx.x % WARP;
  const int g = lane / 4;
  const int c = lane % 4;
  const int warp_row = 64 * group + 16 * warp;
  const bool has_cap = p.soft_cap > 0.0f;
  const float factor = IS_QUANTIZED || has_cap ? 1.0f : fmaxf(fabsf(p.scale) * LOG2_E, 1e-37f);  // see `prefill.cuh`
  const float slack = MOST_GROWTH / factor;
  RingPlace<Memory::QUERY_STAGES> q_place;
  RingPlace<Tiles::STAGES> k_place, v_place;
  RingPlace<HopperShared<Tiles>::TERMS> terms_place;
  auto wait_turn = [&]() {
    if constexpr (Tiles::TAKES_TURNS) sync_named(Named::TURN + group, 2 * WARPGROUP);
  };
  auto give_turn = [&]() {
    if constexpr (Tiles::TAKES_TURNS) arrive_named(Named::TURN + (group + 1) % Tiles::CONSUMERS, 2 * WARPGROUP);
  };
  if (group == Tiles::CONSUMERS - 1) give_turn();  // the first has the first turn

  auto job = [&]() -> const HopperJob& { return shared.jobs[q_place.stage]; };  // read anew, to save registers
  uint64_t q_at;
  auto receive = [&]() {
    wait(shared.queries.full[q_place.stage], q_place.parity);
    fence_async_proxy();
    q_at = matrix_descriptor(
        shared_address(smem + q_place.stage * Memory::QUERY_BYTES) + 64 * group * QueryPanel::ROW_BYTES, 16,
        8 * QueryPanel::ROW_BYTES);
  };
  float s[KEYS / 2];
  // S = Q K^T, 16 columns at a time: two chunks further in the rows, at the end of a panel the next one.
  auto start_scores = [&]() {
    wait(shared.keys.full[k_place.stage], k_place.parity);
    fence_async_proxy();  // the producer's copies are ordinary ones
    const uint64_t k_at = matrix_descriptor(
        shared_address(smem + Memory::K_AT + k_place.stage * Memory::TILE_BYTES), 16, 8 * KeyPanel::ROW_BYTES);
    hold(s);
    fence_products();
#pragma unroll
    for (int i = 0; i < DIM / 16; ++i) {
      multiply_group<T>(s, q_at + (i / 4 * QueryPanel::BYTES + i % 4 * 32) / 16,
                        k_at + (i / 4 * KeyPanel::BYTES + i % 4 * 32) / 16, i > 0);
    }
    commit_products();
  };
  auto finish_scores = [&]() {
    hold(s);
    arrive_as_warp(shared.keys.empty[k_place.stage]);
    k_place.advance();
  };

  float acc[DIM / 2];  // O
  uint32_t weights[KEYS / 16][4];  // P, as a product's operand
  KeyRange<KEYS> range;
  int tile;
  int positions[2];
  SoftmaxSum sums[2];  // m of the products; l is this lane's share of the row's
  auto begin = [&]() {
    const WorkItem& item = job().item;
    range = KeyRange<KEYS>(item, p);
    tile = range.end_tile - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      positions[half] = range.offset + (item.first_row + warp_row + 8 * half + g) / p.group_size;
      sums[half] = SoftmaxSum{};
    }
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) acc[i] = 0.0f;
  };

  // O += P V, 16 keys at a time.
  auto start_values = [&]() {
    wait(shared.values.full[v_place.stage], v_place.parity);
    fence_async_proxy();  // the producer's copies are ordinary ones
    const uint64_t v_at =
        matrix_descriptor(shared_address(smem + Memory::V_AT + v_place.stage * Memory::TILE_BYTES), KeyPanel::BYTES,
                          8 * KeyPanel::ROW_BYTES);
    hold(acc);
    fence_products();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
      multiply_group<T>(acc, weights[i], v_at + i * 16 * KeyPanel::ROW_BYTES / 16);
    }
    commit_products();
  };
  auto finish_values = [&]() {
    hold(acc);
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) hold(weights[i]);
    arrive_as_warp(shared.values.empty[v_place.stage]);
    v_place.advance();
  };

  // What the scores need before their softmax: of INT8 the scales of keys and values, see `prefill_scales.cuh`.
  auto scale_scores = [&]() {
    const auto& terms = shared.terms[terms_place.stage];
    auto each_score = [&](auto change) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
        const float2 factors = terms.pair(terms.factors, 8 * n + 2 * c);
        const float2 logs = terms.pair(terms.logs, 8 * n + 2 * c);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          change(s[4 * n + 2 * half], factors.x, logs.x);
          change(s[4 * n + 2 * half + 1], factors.y, logs.y);
        }
      }
    };
    if (has_cap) {
      __builtin_assume(p.soft_cap > 0.0f);
      each_score([&](float& x, float by, float log) { x = score_of(x * by, p) + log; });
    } else {
      each_score([&](float& x, float by, float log) { x = __fmaf_rn(x, by, log); });
    }
  };
  auto bend_scores = [&]() {
    if (has_cap) {
      __builtin_assume(p.soft_cap > 0.0f);
#pragma unroll
      for (int i = 0; i < KEYS / 2; ++i) s[i] = score_of(s[i], p);
    } else {
#pragma unroll
      for (int i = 0; i < KEYS / 2; ++i) s[i] = -s[i];
    }
  };
  auto mask_scores = [&](int first_key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = positions[half] - first_key - 2 * c;
      const int first = p.window > 0 ? last - p.window + 1 : -KEYS;
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) {
        const int key = 8 * (i / 2) + i % 2;
        float& score = s[4 * (i / 2) + 2 * half + i % 2];
        if (key > last || key < first) score = -INF;
      }
    }
  };
  const bool is_bent = !IS_QUANTIZED && (has_cap || p.scale < 0.0f);

  // The online softmax of a tile, in two steps: its maxima, and the weights. m may lag behind, so mostly no row's has
  // changed, and the four lanes of a row need not meet. `shrink` is what O must be multiplied by then.
  float shrink[2];
  bool has_grown;
  auto find_maxima = [&]() {
    const int first_key = tile * KEYS;
    const bool is_masked = first_key + KEYS - 1 > range.first_position ||
                           (p.window > 0 && first_key <= range.last_position - p.window);
    if constexpr (IS_QUANTIZED) scale_scores();
    // One branch, and its code elsewhere: the loop should be short, for all warps fetch it.
    if (__builtin_expect(is_masked || is_bent, 0)) {
      if (is_bent) bend_scores();
      if (is_masked) mask_scores(first_key);
    }
    float largest[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2] = {s[2 * half], s[2 * half + 1]};
#pragma unroll
      for (int n = 1; n < KEYS / 8; ++n) {
        x[0] = fmaxf(x[0], s[4 * n + 2 * half]);
        x[1] = fmaxf(x[1], s[4 * n + 2 * half + 1]);
      }
      largest[half] = fmaxf(x[0], x[1]);
      shrink[half] = 1.0f;
    }
    has_grown = __any_sync(ALL_LANES, largest[0] > sums[0].m + slack || largest[1] > sums[1].m + slack);
    if (!has_grown) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = largest[half];
      x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
      x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
      if (x > sums[half].m + slack) {  // the row's own affair, whoever has its lanes' company
        shrink[half] = exp2_approx((sums[half].m - x) * factor);
        sums[half].m = x;
      }
    }
  };
  auto weigh = [&]() {
    const auto& terms = shared.terms[terms_place.stage];
    terms_place.advance();
    const float bases[2] = {sums[0].base() * factor, sums[1].base() * factor};
    float added[2][2] = {};
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
      float2 inverses{};
      if constexpr (IS_QUANTIZED) inverses = terms.pair(terms.inverses, 8 * n + 2 * c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& sum = added[half][j];
          float& x = s[4 * n + 2 * half + j];
          x = exp2_approx(__fmaf_rn(x, factor, -bases[half]));
          sum = IS_QUANTIZED ? __fmaf_rn(x, j == 0 ? inverses.x : inverses.y, sum) : __fadd_rn(sum, x);
        }
        weights[n / 2][n % 2 * 2 + half] = pack<T>(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half].l = __fmaf_rn(sums[half].l, shrink[half], __fadd_rn(added[half][0], added[half][1]));
    }
  };

  // O / l, through the rows' own queries' place, so that whole chunks go out.
  auto write = [&]() {
    const WorkItem& item = job().item;
    unsigned char* q_smem = smem + q_place.stage * Memory::QUERY_BYTES;
    sync_named(Named::GROUP + group, WARPGROUP);  // the warpgroup's products have read its queries
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = sums[half].l;
      l += __shfl_xor_sync(ALL_LANES, l, 1);
      l += __shfl_xor_sync(ALL_LANES, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int row = warp_row + 8 * half + g;
#pragma unroll
      for (int i = 0; i < DIM / 8; ++i) {
        *reinterpret_cast<uint32_t*>(q_smem + QueryPanel::offset(row, i) + 4 * c) =
            pack<T>(acc[4 * i + 2 * half] * inverse, acc[4 * i + 2 * half + 1] * inverse);
      }
    }
    __syncwarp();  // the warp's rows are in shared memory
    // A pass of the warp writes a few whole rows.
    constexpr int ROWS_A_PASS = WARP / (DIM / 8);
    const int chunk = lane % (DIM / 8);
    T* group_gmem = static_cast<T*>(p.out) + item.first_token * p.out_token_stride +
                    int64_t(job().kv_head) * p.group_size * p.out_head_stride + chunk * 8;
    RowWalk walk(item.first_row + warp_row + lane / (DIM / 8), ROWS_A_PASS, p.group_size);
#pragma unroll 4
    for (int pass = 0; pass < 16 / ROWS_A_PASS; ++pass) {
      const int row = warp_row + lane / (DIM / 8) + pass * ROWS_A_PASS;
      T* to = group_gmem + walk.token * p.out_token_stride + walk.head * p.out_head_stride;
      walk.advance();
      if (row >= item.num_rows || chunk * 8 >= p.head_dim) continue;
      const unsigned char* from = q_smem + QueryPanel::offset(row, chunk);
      if (p.out_aligned) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) to[j] = reinterpret_cast<const T*>(from)[j];
      }
    }
    arrive_as_warp(shared.queries.empty[q_place.stage]);
  };

  for (;;) {
    receive();
    if (job().item.sequence < 0) return;
    begin();
    start_scores();
    wait_products<0>();
    finish_scores();
    find_maxima();
    weigh();
    for (--tile; tile >= range.begin_tile; --tile) {
      wait_turn();
      start_scores();
      start_values();
      give_turn();
      wait_products<1>();
      finish_scores();
      find_maxima();
      wait_products<0>();  // P V needed about as long as the maxima; the packing of P hides among the exponentials
      finish_values();
      if (has_grown) {
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) acc[i] = __fmul_rn(acc[i], shrink[i / 2 % 2]);
      }
      weigh();
    }
    start_values();
    wait_products<0>();
    finish_values();
    write();
    q_place.advance();
  }
}

}  // namespace pagetide
