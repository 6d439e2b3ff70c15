#include "../prefill_hopper.cuh"

namespace pagetide {
template bool launch_prefill_hopper_instance<Half, Half, 64>(const AttentionParams&, cudaStream_t);
template bool launch_prefill_hopper_instance<Half, Half, 128>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
