#include "../prefill.cuh"

namespace pagetide {
template void launch_prefill_instance<Half, 64>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, 80>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, 96>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, 128>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, 256>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
