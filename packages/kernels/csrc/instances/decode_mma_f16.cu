#include "../decode_mma.cuh"

namespace pagetide {
template void launch_decode_instance<MmaEngine<Half, 64>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, 80>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, 96>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, 128>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<MmaEngine<Half, 256>>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
