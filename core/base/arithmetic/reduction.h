#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/arithmetic/dtype.h"
#include "base/export.h"

namespace multiring {

/// Reductions. The values are part of the C ABI (multiring.h).
enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kAverage = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kBitwiseAnd = 5,
  kBitwiseOr = 6,
  kBitwiseXor = 7
};
inline constexpr int kReduceOpCount = 8;
constexpr bool is_bitwise(ReduceOp op) { return op >= ReduceOp::kBitwiseAnd; }
/// Whether complex numbers can be reduced by it: they have no order.
constexpr bool has_complex(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAverage || op == ReduceOp::kProduct;
}

MULTIRING_API const char* reduce_op_name(ReduceOp op);

/// What is done to the elements: out = postscale * op(prescale * in[0], prescale * in[1], ...).
///
/// Average is the sum divided by the number of inputs (a true division: the average of equal values is that
/// value). Scale factors are rounded to the type that is computed in. Integers: scale factors multiply in
/// double, truncate toward zero and saturate (NaN gives 0), the average is exact and truncates toward zero,
/// sums wrap. Bool: sum and max are "or", product and min are "and"; average and scale factors are not
/// defined. The bitwise operations are those of integers and bool, without scale factors. Min and max give
/// NaN if any input is NaN, and the lower input of equal ones (+0 and -0). A NaN that is computed is the
/// positive quiet one of its type, since which payload an addition keeps differs between processors. Complex
/// numbers have sum, average and product; scale factors multiply both parts, and each part of a result has
/// its NaN.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  /// Average: the divisor of the sum; 0: the number of inputs. To be set where inputs are sums themselves.
  std::size_t divisor = 0;
};

/// Reduces `inputs` element by element and writes the result to every one of `outputs`.
///
/// The order of operations is the canonical one: a balanced binary tree over the index of the input,
/// tree(lo, hi) = tree(lo, lo + p) op tree(lo + p, hi) with p the largest power of two below hi - lo.
/// float16 and bfloat16 are widened to float32 at the leaves and rounded (to nearest even) once, at the end.
/// The bits of out[i] depend on the i-th elements and the number of inputs only: not on `count`, alignment
/// or the processor.
///
/// Rounding mode and denormals are those of the standard while it runs, whatever the thread has set.
/// Raises std::invalid_argument for no inputs, for what is not defined for bool, complex numbers or bitwise,
/// and for averages of integers, which take a wider type than theirs (collective/sums/integer_average.h).
///
/// An output may be the same buffer as an input; buffers must not overlap otherwise. `count` may be 0.
MULTIRING_API void reduce(DType dtype, const Reduction& reduction, std::span<const void* const> inputs,
                          std::span<void* const> outputs, std::size_t count);

}  // namespace multiring
