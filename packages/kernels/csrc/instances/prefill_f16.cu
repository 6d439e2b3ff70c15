#include "../prefill_launch.cuh"

namespace pagetide {
template void launch_prefill_instance<Half, Half, 64>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, Half, 80>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, Half, 96>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, Half, 128>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, Half, 256>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
