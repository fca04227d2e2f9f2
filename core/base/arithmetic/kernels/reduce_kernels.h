#pragma once

#include <cstddef>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/reduction.h"
#include "base/cpu.h"

namespace multiring {

/// What one kernel call does, in types that need no inline function of the standard library: kernels are
/// compiled once per instruction set, and the linker may keep any one copy of a shared inline function.
struct ReduceJob {
  const void* const* inputs;
  std::size_t input_count;
  void* const* outputs;
  std::size_t output_count;
  std::size_t count;  // of numbers: two for a complex one
  double prescale;
  double postscale;
  std::size_t divisor;  // the number of inputs for an average, else 1
};

using ReduceKernel = void (*)(const ReduceJob& job);

/// Converts `count` elements.
using HalfKernel = void (*)(const void* input, void* output, std::size_t count);

/// One kernel for each dtype and operation (that of average is that of sum, and null for integers; null for
/// bitwise operations of floating-point numbers, and where complex numbers have no such operation), and
/// conversions of float16 and bfloat16 to float32 and back.
struct ReduceKernels {
  ReduceKernel table[kDTypeCount][kReduceOpCount];
  HalfKernel widen[2];
  HalfKernel narrow[2];
};

/// The kernels of one instruction set; null where this build has none.
const ReduceKernels* plain_kernels();
const ReduceKernels* avx2_kernels();
const ReduceKernels* avx512_kernels();

/// Whether reduce_with() can use the instruction set: this build has kernels and the processor runs them.
MULTIRING_API bool has_kernels(Isa isa);
/// What reduce(), widen() and narrow() use.
MULTIRING_API Isa best_isa();
/// The kernels of best_isa().
const ReduceKernels& best_kernels();
/// Throws std::invalid_argument if !has_kernels(isa).
const ReduceKernels& kernels_of(Isa isa);
/// reduce() on a given instruction set, for tests; throws std::invalid_argument if !has_kernels(isa).
MULTIRING_API void reduce_with(Isa isa, DType dtype, const Reduction& reduction,
                               std::span<const void* const> inputs, std::span<void* const> outputs,
                               std::size_t count);
/// widen() and narrow() of base/arithmetic/half.h in the same way.
MULTIRING_API void widen_with(Isa isa, DType half, const void* input, void* output, std::size_t count);
MULTIRING_API void narrow_with(Isa isa, DType half, const void* input, void* output, std::size_t count);

}  // namespace multiring
