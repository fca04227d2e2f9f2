#include "base/arithmetic/reduction.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "base/arithmetic/kernels/copy.h"
#include "base/arithmetic/kernels/reduce_kernels.h"
#include "base/cpu.h"

namespace multiring {
namespace {

constexpr const char* kOpNames[kReduceOpCount] = {"sum",     "average",     "min",        "max",
                                                  "product", "bitwise_and", "bitwise_or", "bitwise_xor"};

const ReduceKernels* compiled_kernels(Isa isa) {
  switch (isa) {
    case Isa::kPlain:
      return plain_kernels();
    case Isa::kAvx2:
      return avx2_kernels();
    case Isa::kAvx512:
      return avx512_kernels();
  }
  return nullptr;
}

void check(DType dtype, const Reduction& reduction, std::span<const void* const> inputs) {
  reduce_op_name(reduction.op);  // throws for an unknown one
  if (inputs.empty()) throw std::invalid_argument("reduce() needs at least one input");
  if (reduction.op == ReduceOp::kAverage && !is_floating(dtype)) {
    throw std::invalid_argument(std::string("reduce() has no average of ") + dtype_name(dtype));
  }
  if (is_bitwise(reduction.op) && is_floating(dtype)) {
    throw std::invalid_argument(std::string("reduce() has no ") + reduce_op_name(reduction.op) + " of " +
                                dtype_name(dtype));
  }
  if (is_complex(dtype) && !has_complex(reduction.op)) {
    throw std::invalid_argument(std::string("reduce() has no ") + reduce_op_name(reduction.op) + " of " +
                                dtype_name(dtype));
  }
  if (reduction.prescale == 1.0 && reduction.postscale == 1.0) return;
  if (dtype == DType::kBool) {
    throw std::invalid_argument("bool cannot be scaled; convert to another dtype first");
  }
  if (is_bitwise(reduction.op)) throw std::invalid_argument("a bitwise reduction cannot be scaled");
}

void copy(const void* input, std::span<void* const> outputs, std::size_t bytes) {
  if (bytes == 0) return;
  for (void* output : outputs) {
    if (output != input) copy_bytes(output, input, bytes);
  }
}

void run(const ReduceKernels& kernels, DType dtype, const Reduction& reduction,
         std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t count) {
  check(dtype, reduction, inputs);
  const std::size_t bytes = count * dtype_size(dtype);
  if (bytes == 0 || outputs.empty()) return;
  const std::size_t divisor = reduction.op != ReduceOp::kAverage ? 1
                              : reduction.divisor != 0           ? reduction.divisor
                                                                 : inputs.size();
  if (inputs.size() == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0 && divisor == 1) {
    copy(inputs[0], outputs, bytes);
    return;
  }
  const ReduceJob job{.inputs = inputs.data(),
                      .input_count = inputs.size(),
                      .outputs = outputs.data(),
                      .output_count = outputs.size(),
                      .count = is_complex(dtype) ? 2 * count : count,
                      .prescale = reduction.prescale,
                      .postscale = reduction.postscale,
                      .divisor = divisor};
  const StandardFloatMode standard_float_mode;
  kernels.table[static_cast<int>(dtype)][static_cast<int>(reduction.op)](job);
}

}  // namespace

const char* reduce_op_name(ReduceOp op) {
  const int index = static_cast<int>(op);
  if (index >= kReduceOpCount) {
    throw std::invalid_argument("unknown reduction number " + std::to_string(index));
  }
  return kOpNames[index];
}

bool has_kernels(Isa isa) { return compiled_kernels(isa) != nullptr && cpu_supports(isa); }

Isa best_isa() {
  if (has_kernels(Isa::kAvx512)) return Isa::kAvx512;
  if (has_kernels(Isa::kAvx2)) return Isa::kAvx2;
  return Isa::kPlain;
}

const ReduceKernels& best_kernels() {
  static const ReduceKernels& kernels = *compiled_kernels(best_isa());
  return kernels;
}

const ReduceKernels& kernels_of(Isa isa) {
  if (!has_kernels(isa)) {
    throw std::invalid_argument(std::string("no reduction kernels for ") + isa_name(isa) +
                                " in this build or on this processor");
  }
  return *compiled_kernels(isa);
}

void reduce(DType dtype, const Reduction& reduction, std::span<const void* const> inputs,
            std::span<void* const> outputs, std::size_t count) {
  run(best_kernels(), dtype, reduction, inputs, outputs, count);
}

void reduce_with(Isa isa, DType dtype, const Reduction& reduction, std::span<const void* const> inputs,
                 std::span<void* const> outputs, std::size_t count) {
  run(kernels_of(isa), dtype, reduction, inputs, outputs, count);
}

}  // namespace multiring
