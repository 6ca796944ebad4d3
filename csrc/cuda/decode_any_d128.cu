#include "cuda/decode_launch.cuh"

template kvarn::Status kvarn::cuda::launch_decode<kvarn::cuda::AnyFormat<128>, 1>(
    const DecodeParams&, const DecodePlan&, int, int);
