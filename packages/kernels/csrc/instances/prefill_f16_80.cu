#include "../prefill.cuh"
template void pagetide::launch_prefill_instance<pagetide::Half, 80>(const AttentionParams&, cudaStream_t);
