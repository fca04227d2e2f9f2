#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/reduction.h"

namespace multiring::testing {

using Bytes = std::vector<std::uint8_t>;

/// The type of the numbers that an element is made of: a complex one is a pair of them.
constexpr DType number_type(DType dtype) {
  if (dtype == DType::kComplex64) return DType::kFloat32;
  return dtype == DType::kComplex128 ? DType::kFloat64 : dtype;
}

/// What reduce() must give, computed one number at a time by the recursion of its specification; not for
/// products of complex numbers.
Bytes reduce_oracle(DType dtype, const Reduction& reduction, const std::vector<Bytes>& inputs);

/// Elements that exercise a dtype: ordinary values, and with `special` one in four is a limit, zero,
/// denormal, infinity, NaN (of any payload) or any bits at all.
Bytes random_elements(DType dtype, std::size_t count, std::uint32_t seed, bool special);

/// The value of the number at `index`; a complex element has two.
double value_at(DType dtype, const Bytes& bytes, std::size_t index);

}  // namespace multiring::testing
