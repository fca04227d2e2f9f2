// Kernels in the instructions that every processor of the architecture has.
#define MULTIRING_KERNEL_NAMESPACE kernels_plain
#define MULTIRING_VECTOR_BYTES 16
#include "base/arithmetic/kernels/reduce_kernels.inc"

namespace multiring {

const ReduceKernels* plain_kernels() { return &kernels_plain::kKernels; }

}  // namespace multiring
