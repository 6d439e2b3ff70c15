#include "../prefill.cuh"

namespace pagetide {
template void launch_prefill_instance<BFloat, 64>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, 80>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, 96>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, 128>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<BFloat, 256>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
