// Kernels in AVX-512 (F, BW, DQ, VL); nothing where the compiler is not asked for these.
#include "base/arithmetic/kernels/reduce_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MULTIRING_KERNEL_NAMESPACE kernels_avx512
#define MULTIRING_VECTOR_BYTES 64
#include "base/arithmetic/kernels/reduce_kernels.inc"

const multiring::ReduceKernels* multiring::avx512_kernels() { return &kernels_avx512::kKernels; }
#else
const multiring::ReduceKernels* multiring::avx512_kernels() { return nullptr; }
#endif
