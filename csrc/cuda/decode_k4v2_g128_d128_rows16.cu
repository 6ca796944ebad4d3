#include "cuda/decode_launch.cuh"

template kvarn::Status
kvarn::cuda::launch_decode<kvarn::cuda::StaticFormat<4, 2, 128, 128, false, true>, 2>(
    const DecodeParams&, const DecodePlan&, int, int);
