#include "../decode_mma.cuh"

namespace pagetide {
template void launch_decode_instance<MmaEngine<BFloat, 64>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, 80>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, 96>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, 128>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<BFloat, 256>>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
