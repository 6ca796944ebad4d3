#include "cuda/decode_group_kernel.cuh"

template kvarn::Status kvarn::cuda::launch_decode_group<4, 2, 4>(const DecodeParams&,
                                                                 const DecodePlan&, int, int);
template int kvarn::cuda::decode_group_bytes<4>();
