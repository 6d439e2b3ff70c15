#include "../decode_simt.cuh"
template void pagetide::launch_decode_instance<pagetide::SimtEngine<pagetide::Half, 128>>(const AttentionParams&, cudaStream_t);
