#include "cpu/attention.h"

#include "cpu/isa.h"

namespace kvarn::cpu {

namespace generic {
extern const AttentionKernels kAttentionKernels;
}
#ifdef KVARN_CPU_X86
namespace avx2 {
extern const AttentionKernels kAttentionKernels;
}
namespace avx512 {
extern const AttentionKernels kAttentionKernels;
}
#endif

const AttentionKernels& attention_kernels() {
  switch (current_isa()) {
#ifdef KVARN_CPU_X86
    case Isa::kAvx512:
      return avx512::kAttentionKernels;
    case Isa::kAvx2:
      return avx2::kAttentionKernels;
#endif
    default:
      return generic::kAttentionKernels;
  }
}

}  // namespace kvarn::cpu
