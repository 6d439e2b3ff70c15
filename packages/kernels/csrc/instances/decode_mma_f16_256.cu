#include "../decode_mma.cuh"
template void pagetide::launch_decode_instance<pagetide::MmaEngine<pagetide::Half, 256>>(const AttentionParams&, cudaStream_t);
