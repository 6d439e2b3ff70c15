#include "../decode_simt.cuh"

namespace pagetide {
template void launch_decode_instance<SimtEngine<int8_t, 64>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<SimtEngine<int8_t, 128>>(const AttentionParams&, cudaStream_t);
template void launch_decode_instance<SimtEngine<int8_t, 256>>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
