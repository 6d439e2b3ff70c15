#include "../decode_mma.cuh"

namespace pagetide {
template void launch_decode_instance<MmaEngine<Half, int8_t, 64, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, int8_t, 64, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, int8_t, 128, 1>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, int8_t, 128, 2>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, int8_t, 256, 1>>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
