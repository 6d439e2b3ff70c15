#include "../prefill.cuh"
template void pagetide::launch_prefill_instance<pagetide::BFloat, 128>(const AttentionParams&, cudaStream_t);
