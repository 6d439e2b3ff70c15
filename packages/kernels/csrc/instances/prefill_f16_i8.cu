#include "../prefill_launch.cuh"

namespace pagetide {
template void launch_prefill_instance<Half, int8_t, 64>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, int8_t, 128>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, int8_t, 256>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
