#include "base/arithmetic/half.h"

#include "base/arithmetic/kernels/reduce_kernels.h"
#include "base/cpu.h"

namespace multiring {
namespace {

std::size_t row(DType half) { return half == DType::kFloat16 ? 0 : 1; }

// Rounding is asked of additions where the processor has no conversion.
void convert(HalfKernel kernel, const void* input, void* output, std::size_t count) {
  const StandardFloatMode standard_float_mode;
  kernel(input, output, count);
}

}  // namespace

void widen(DType half, const void* input, void* output, std::size_t count) {
  convert(best_kernels().widen[row(half)], input, output, count);
}

void narrow(DType half, const void* input, void* output, std::size_t count) {
  convert(best_kernels().narrow[row(half)], input, output, count);
}

void widen_with(Isa isa, DType half, const void* input, void* output, std::size_t count) {
  convert(kernels_of(isa).widen[row(half)], input, output, count);
}

void narrow_with(Isa isa, DType half, const void* input, void* output, std::size_t count) {
  convert(kernels_of(isa).narrow[row(half)], input, output, count);
}

}  // namespace multiring
