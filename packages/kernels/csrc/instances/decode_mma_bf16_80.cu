#include "../decode_mma.cuh"
template void pagetide::launch_decode_instance<pagetide::MmaEngine<pagetide::BFloat, 80>>(const AttentionParams&, cudaStream_t);
