#include "../prefill.cuh"
template void pagetide::launch_prefill_instance<pagetide::Half, 256>(const AttentionParams&, cudaStream_t);
