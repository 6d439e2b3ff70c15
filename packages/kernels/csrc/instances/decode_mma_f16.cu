#include "../decode_mma.cuh"

namespace pagetide {
template void launch_decode_instance<MmaEngine<Half, Half, 64, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 64, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 80, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 80, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 96, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 96, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 128, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 128, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, Half, 256, 1>>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
