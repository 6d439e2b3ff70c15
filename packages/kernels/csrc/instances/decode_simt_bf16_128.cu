#include "../decode_simt.cuh"
template void pagetide::launch_decode_instance<pagetide::SimtEngine<pagetide::BFloat, 128>>(const AttentionParams&, cudaStream_t);
