#include "../prefill.cuh"
template void pagetide::launch_prefill_instance<pagetide::Half, 64>(const AttentionParams&, cudaStream_t);
