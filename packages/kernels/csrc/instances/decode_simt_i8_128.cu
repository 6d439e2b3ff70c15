#include "../decode_simt.cuh"
template void pagetide::launch_decode_instance<pagetide::SimtEngine<int8_t, 128>>(const AttentionParams&, cudaStream_t);
