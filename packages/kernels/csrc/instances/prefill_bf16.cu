#include "../prefill_launch.cuh"

namespace pagetide {
template void launch_prefill_instance<BFloat, BFloat, 64>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, BFloat, 80>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, BFloat, 96>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, BFloat, 128>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, BFloat, 256>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
