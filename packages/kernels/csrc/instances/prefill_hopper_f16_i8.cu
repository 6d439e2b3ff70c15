#include "../prefill_hopper.cuh"

namespace pagetide {
template bool launch_prefill_hopper_instance<Half, int8_t, 64>(const AttentionParams&, cudaStream_t);
template bool launch_prefill_hopper_instance<Half, int8_t, 128>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
