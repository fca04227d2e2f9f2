#include "support/oracles/problem.h"

#include <algorithm>

namespace multiring::testing {

Bytes repeated(const Bytes& period, std::size_t bytes) {
  Bytes result(bytes);
  for (std::size_t at = 0; at < bytes; at += period.size()) {
    const std::size_t part = std::min(period.size(), bytes - at);
    std::copy_n(period.begin(), part, result.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return result;
}

Bytes periodic_elements(DType dtype, std::size_t count, std::uint32_t seed, bool special) {
  return repeated(random_elements(dtype, std::min(count, kPeriod), seed, special), count * dtype_size(dtype));
}

std::string ReduceProblem::text() const {
  return std::string(reduce_op_name(reduction.op)) + " of " + std::to_string(count) + " " + dtype_name(dtype);
}

ReduceProblem make_problem(DType dtype, const Reduction& reduction, std::size_t count, int size) {
  const auto seed = static_cast<std::uint32_t>(count * 131 + static_cast<std::size_t>(dtype) * 17);
  const std::size_t bytes = count * dtype_size(dtype);
  ReduceProblem problem{dtype, reduction, count, {}, {}};
  for (int rank = 0; rank < size; ++rank)
    problem.inputs.push_back(
        random_elements(dtype, std::min(count, kPeriod), seed + static_cast<std::uint32_t>(rank), true));
  problem.expected = repeated(reduce_oracle(dtype, reduction, problem.inputs), bytes);
  for (Bytes& input : problem.inputs) input = repeated(input, bytes);
  return problem;
}

}  // namespace multiring::testing
