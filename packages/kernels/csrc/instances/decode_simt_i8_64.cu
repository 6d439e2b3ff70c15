#include "../decode_simt.cuh"
template void pagetide::launch_decode_instance<pagetide::SimtEngine<int8_t, 64>>(const AttentionParams&, cudaStream_t);
