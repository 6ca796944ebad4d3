#include "cuda/decode_launch.cuh"

template kvarn::Status
kvarn::cuda::launch_decode<kvarn::cuda::StaticFormat<3, 3, 128, 128, true, true>, 1>(
    const DecodeParams&, const DecodePlan&, int, int);
