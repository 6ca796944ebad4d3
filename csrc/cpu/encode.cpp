#include "cpu/encode.h"

#include "cpu/isa.h"

namespace kvarn::cpu {

namespace generic {
extern const EncodeKernels kEncodeKernels;
}
#ifdef KVARN_CPU_X86
namespace avx2 {
extern const EncodeKernels kEncodeKernels;
}
namespace avx512 {
extern const EncodeKernels kEncodeKernels;
}
#endif

const EncodeKernels& encode_kernels() {
  switch (current_isa()) {
#ifdef KVARN_CPU_X86
    case Isa::kAvx512:
      return avx512::kEncodeKernels;
    case Isa::kAvx2:
      return avx2::kEncodeKernels;
#endif
    default:
      return generic::kEncodeKernels;
  }
}

}  // namespace kvarn::cpu
