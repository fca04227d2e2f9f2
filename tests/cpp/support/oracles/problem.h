#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/reduction.h"
#include "support/oracles/reduce_oracle.h"

namespace multiring::testing {

/// `count` elements that repeat with a prime period, so that many are cheap and still no two segments or
/// slices are alike.
Bytes periodic_elements(DType dtype, std::size_t count, std::uint32_t seed, bool special);

/// With this period, in elements.
inline constexpr std::size_t kPeriod = 997;
/// `bytes` bytes that repeat `period`.
Bytes repeated(const Bytes& period, std::size_t bytes);

/// A reduction with its result.
struct ReduceProblem {
  DType dtype;
  Reduction reduction;
  std::size_t count;
  std::vector<Bytes> inputs;  ///< of each rank
  Bytes expected;

  const Bytes& input(int rank) const { return inputs[static_cast<std::size_t>(rank)]; }
  std::size_t bytes() const { return expected.size(); }
  /// "sum of 37 float32"
  std::string text() const;
};
/// Of any elements: zeros, denormals, infinities and NaN among them.
ReduceProblem make_problem(DType dtype, const Reduction& reduction, std::size_t count, int size);
/// Of elements whose reductions are exact, so that no order of additions changes a bit.
ReduceProblem exact_problem(DType dtype, const Reduction& reduction, std::size_t count, int size);
/// `values` as elements of `dtype`; integers wrap, and a complex one is value - value * i.
Bytes encoded(DType dtype, const std::vector<int>& values);

}  // namespace multiring::testing
