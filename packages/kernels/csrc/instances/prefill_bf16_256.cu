#include "../prefill.cuh"
template void pagetide::launch_prefill_instance<pagetide::BFloat, 256>(const AttentionParams&, cudaStream_t);
