#include "../decode_simt.cuh"

namespace pagetide {
template void launch_decode_instance<SimtEngine<float, 64>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<SimtEngine<float, 128>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<SimtEngine<float, 256>>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
