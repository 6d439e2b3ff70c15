#include "../prefill.cuh"
template void pagetide::launch_prefill_instance<pagetide::Half, 96>(const AttentionParams&, cudaStream_t);
