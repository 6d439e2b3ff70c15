// Copying whole blocks: within the device by a kernel, to and from the host by the copy engine.
#include <algorithm>

#include "launch.h"

namespace pagetide {
namespace {

constexpr int PAIRS_A_LAUNCH = 480;  // they travel as kernel arguments (4 KB), so that nothing is uploaded
constexpr int THREADS = 256;
constexpr int WORDS_A_THREAD = 4;

struct CopyParams {
  const void* source;
  void* destination;
  int64_t source_plane_bytes, destination_plane_bytes, block_bytes;
  int32_t pairs[2 * PAIRS_A_LAUNCH];
};

// One chunk of one block of one plane; grid (chunks, copies, planes).
template <typename Word>
__global__ void __launch_bounds__(THREADS) copy_blocks_kernel(const __grid_constant__ CopyParams p) {
  const int64_t plane = blockIdx.z;
  const int64_t from_block = p.pairs[2 * blockIdx.y];
  const int64_t to_block = p.pairs[2 * blockIdx.y + 1];
  const auto* from = reinterpret_cast<const Word*>(static_cast<const char*>(p.source) + plane * p.source_plane_bytes +
                                                   from_block * p.block_bytes);
  auto* to = reinterpret_cast<Word*>(static_cast<char*>(p.destination) + plane * p.destination_plane_bytes +
                                     to_block * p.block_bytes);
  const int64_t num_words = p.block_bytes / int64_t{sizeof(Word)};
  const int64_t first = int64_t{blockIdx.x} * THREADS * WORDS_A_THREAD + threadIdx.x;
  Word words[WORDS_A_THREAD];
#pragma unroll
  for (int i = 0; i < WORDS_A_THREAD; ++i) {
    if (first + i * THREADS < num_words) words[i] = from[first + i * THREADS];
  }
#pragma unroll
  for (int i = 0; i < WORDS_A_THREAD; ++i) {
    if (first + i * THREADS < num_words) to[first + i * THREADS] = words[i];
  }
}

bool divides(int64_t size, const CopyParams& p) {
  const auto address = [](const void* x) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(x)); };
  return (address(p.source) | address(p.destination) | p.source_plane_bytes | p.destination_plane_bytes |
          p.block_bytes) %
             size ==
         0;
}

template <typename Word>
void launch(const CopyParams& p, int num_pairs, int num_planes, cudaStream_t stream) {
  const int64_t chunk = int64_t{sizeof(Word)} * THREADS * WORDS_A_THREAD;
  const dim3 grid(unsigned((p.block_bytes + chunk - 1) / chunk), num_pairs, num_planes);
  copy_blocks_kernel<Word><<<grid, THREADS, 0, stream>>>(p);
}

}  // namespace

void launch_copy_blocks(const void* source, void* destination, int64_t source_plane_bytes,
                        int64_t destination_plane_bytes, int64_t block_bytes, int num_planes, const int32_t* pairs,
                        int num_pairs, cudaStream_t stream) {
  CopyParams p{source, destination, source_plane_bytes, destination_plane_bytes, block_bytes, {}};
  for (int first = 0; first < num_pairs; first += PAIRS_A_LAUNCH) {
    const int count = std::min(PAIRS_A_LAUNCH, num_pairs - first);
    std::copy_n(pairs + 2 * first, 2 * count, p.pairs);
    if (divides(16, p)) {
      launch<uint4>(p, count, num_planes, stream);
    } else {
      launch<uint32_t>(p, count, num_planes, stream);
    }
    check(cudaGetLastError(), "the launch of copy_blocks");
  }
}

void swap_blocks(const void* source, void* destination, int64_t source_plane_bytes, int64_t destination_plane_bytes,
                 int64_t block_bytes, int num_planes, const int32_t* pairs, int num_pairs, bool to_host,
                 cudaStream_t stream) {
  for (int first = 0; first < num_pairs;) {
    // Copies whose blocks stand side by side on both sides go as one.
    int end = first + 1;
    while (end < num_pairs && pairs[2 * end] == pairs[2 * end - 2] + 1 && pairs[2 * end + 1] == pairs[2 * end - 1] + 1) {
      ++end;
    }
    const char* from = static_cast<const char*>(source) + pairs[2 * first] * block_bytes;
    char* to = static_cast<char*>(destination) + pairs[2 * first + 1] * block_bytes;
    check(cudaMemcpy2DAsync(to, destination_plane_bytes, from, source_plane_bytes, (end - first) * block_bytes,
                            num_planes, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream),
          "a copy of blocks between device and host");
    first = end;
  }
}

}  // namespace pagetide
