#include "support/oracles/problem.h"

#include <algorithm>
#include <cstring>

#include "base/arithmetic/half.h"

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

Bytes encoded(DType dtype, const std::vector<int>& values) {
  if (is_complex(dtype)) {
    std::vector<int> numbers;
    for (const int value : values) numbers.insert(numbers.end(), {value, -value});
    return encoded(number_type(dtype), numbers);
  }
  const std::size_t element = dtype_size(dtype);
  Bytes bytes(values.size() * element);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint8_t* const to = bytes.data() + i * element;
    if (const auto real = static_cast<float>(values[i]); is_half(dtype)) {
      narrow(dtype, &real, to, 1);
    } else if (dtype == DType::kFloat32) {
      std::memcpy(to, &real, element);
    } else if (dtype == DType::kFloat64) {
      const double wide = real;
      std::memcpy(to, &wide, element);
    } else {
      const std::int64_t whole = dtype == DType::kBool ? values[i] != 0 : values[i];
      std::memcpy(to, &whole, element);  // little-endian
    }
  }
  return bytes;
}

ReduceProblem exact_problem(DType dtype, const Reduction& reduction, std::size_t count, int size) {
  ReduceProblem problem{dtype, reduction, count, {}, {}};
  const bool product = reduction.op == ReduceOp::kProduct;
  for (int rank = 0; rank < size; ++rank) {
    std::vector<int> values(count);
    for (std::size_t i = 0; i < count; ++i) {
      const int value = static_cast<int>((i * 11 + static_cast<std::size_t>(rank) * 5) % 7) - 3;
      values[i] = product ? (value == 1 ? 2 : value < 0 ? -1 : 1) : value;
    }
    problem.inputs.push_back(encoded(dtype, values));
  }
  problem.expected = reduce_oracle(dtype, reduction, problem.inputs);
  return problem;
}

}  // namespace multiring::testing
