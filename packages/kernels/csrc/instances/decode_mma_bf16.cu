#include "../decode_mma.cuh"

namespace pagetide {
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 64, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 64, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 80, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 80, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 96, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 96, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 128, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 128, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, BFloat, 256, 1>>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
