#include "cuda/decode_launch.cuh"

template kvarn::Status
kvarn::cuda::launch_decode<kvarn::cuda::WithSplits<kvarn::cuda::StaticFormat<4, 2, 128, 128, true>>,
                           1>(const DecodeParams&, const DecodePlan&, int, int);
