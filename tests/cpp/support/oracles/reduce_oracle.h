#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/reduction.h"

namespace multiring::testing {

using Bytes = std::vector<std::uint8_t>;

/// What reduce() must give, computed one element at a time by the recursion of its specification.
Bytes reduce_oracle(DType dtype, const Reduction& reduction, const std::vector<Bytes>& inputs);

/// Elements that exercise a dtype: ordinary values, and with `special` one in four is a limit, zero,
/// denormal, infinity, NaN (of any payload) or any bits at all.
Bytes random_elements(DType dtype, std::size_t count, std::uint32_t seed, bool special);

/// The value of the element at `index`.
double value_at(DType dtype, const Bytes& bytes, std::size_t index);

}  // namespace multiring::testing
