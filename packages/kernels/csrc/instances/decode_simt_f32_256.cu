#include "../decode_simt.cuh"
template void pagetide::launch_decode_instance<pagetide::SimtEngine<float, 256>>(const AttentionParams&, cudaStream_t);
