// Kernels in AVX2 and F16C; nothing where the compiler is not asked for these.
#include "base/arithmetic/kernels/reduce_kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#define MULTIRING_KERNEL_NAMESPACE kernels_avx2
#define MULTIRING_VECTOR_BYTES 32
#include "base/arithmetic/kernels/reduce_kernels.inc"

const multiring::ReduceKernels* multiring::avx2_kernels() { return &kernels_avx2::kKernels; }
#else
const multiring::ReduceKernels* multiring::avx2_kernels() { return nullptr; }
#endif
