#include "cuda/decode_launch.cuh"

template kvarn::Status kvarn::cuda::launch_decode<kvarn::cuda::AnyFormat<64>, 1>(
    const DecodeParams&, const DecodePlan&, int, int);
template kvarn::Status kvarn::cuda::launch_decode<kvarn::cuda::AnyFormat<64>, 2>(
    const DecodeParams&, const DecodePlan&, int, int);
