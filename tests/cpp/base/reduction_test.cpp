#include "base/arithmetic/reduction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/arithmetic/kernels/reduce_kernels.h"
#include "support/oracles/reduce_oracle.h"

namespace multiring {
namespace {

using namespace testing;

const std::size_t kInputCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 33, 65};
// None but the first two is a multiple of a vector; the last spans several blocks of every dtype.
const std::size_t kCounts[] = {0, 1, 37, 4099};

/// A buffer that begins at an address aligned for its elements and for nothing more, between guard bytes.
class Buffer {
 public:
  Buffer(DType dtype, const Bytes& content)
      : begin_(64 + dtype_size(dtype)), size_(content.size()), memory_(begin_ + size_ + 64, kGuard) {
    std::copy(content.begin(), content.end(), memory_.begin() + static_cast<std::ptrdiff_t>(begin_));
  }
  void* data() { return memory_.data() + begin_; }
  Bytes content() const { return {memory_.begin() + begin(), memory_.begin() + end()}; }
  bool guards_hold() const {
    const auto is_guard = [](std::uint8_t byte) { return byte == kGuard; };
    return std::all_of(memory_.begin(), memory_.begin() + begin(), is_guard) &&
           std::all_of(memory_.begin() + end(), memory_.end(), is_guard);
  }

 private:
  static constexpr std::uint8_t kGuard = 0xa5;
  std::ptrdiff_t begin() const { return static_cast<std::ptrdiff_t>(begin_); }
  std::ptrdiff_t end() const { return static_cast<std::ptrdiff_t>(begin_ + size_); }

  std::size_t begin_, size_;
  std::vector<std::uint8_t> memory_;
};

struct Case {
  DType dtype;
  Reduction reduction;
  std::size_t count;
  std::vector<Bytes> inputs;
  Bytes expected;

  std::string text() const {
    return std::string(dtype_name(dtype)) + " " + reduce_op_name(reduction.op) + " of " +
           std::to_string(inputs.size()) + " inputs of " + std::to_string(count) + " elements, prescale " +
           std::to_string(reduction.prescale) + ", postscale " + std::to_string(reduction.postscale);
  }
};

/// A case of `n` inputs.
Case make_case(DType dtype, const Reduction& reduction, std::size_t count, std::size_t n,
               bool special = true) {
  Case c{dtype, reduction, count, {}, {}};
  for (std::size_t k = 0; k < n; ++k)
    c.inputs.push_back(random_elements(dtype, count, static_cast<std::uint32_t>(1000 * n + k), special));
  c.expected = reduce_oracle(dtype, reduction, c.inputs);
  return c;
}

void expect_same_bytes(DType dtype, const Bytes& actual, const Bytes& expected) {
  if (actual == expected) return;
  const auto differ = std::mismatch(actual.begin(), actual.end(), expected.begin()).first - actual.begin();
  const std::size_t index = static_cast<std::size_t>(differ) / dtype_size(number_type(dtype));
  ADD_FAILURE() << "number " << index << " is " << value_at(dtype, actual, index) << ", expected "
                << value_at(dtype, expected, index) << " (byte " << differ << ")";
}

/// Reduces on one instruction set. The outputs are `extra` buffers of their own, then the inputs numbered in
/// `aliased`; every one of them must hold the result, every other input what it held.
void check_with(Isa isa, const Case& c, std::size_t extra, const std::vector<std::size_t>& aliased) {
  SCOPED_TRACE(isa_name(isa) + (" " + c.text()) + ", outputs " + std::to_string(extra) + " + " +
               std::to_string(aliased.size()) + " in place");
  const std::size_t n = c.inputs.size();
  std::vector<Buffer> buffers;
  for (const Bytes& input : c.inputs) buffers.emplace_back(c.dtype, input);
  for (std::size_t k = 0; k < extra; ++k) buffers.emplace_back(c.dtype, Bytes(c.expected.size(), 0xee));
  std::vector<const void*> in;
  std::vector<void*> out;
  for (std::size_t k = 0; k < n; ++k) in.push_back(buffers[k].data());
  for (std::size_t k = 0; k < extra; ++k) out.push_back(buffers[n + k].data());
  for (const std::size_t k : aliased) out.push_back(buffers[k].data());
  reduce_with(isa, c.dtype, c.reduction, in, out, c.count);
  for (std::size_t k = 0; k < buffers.size(); ++k) {
    const bool written = k >= n || std::count(aliased.begin(), aliased.end(), k) != 0;
    SCOPED_TRACE("buffer " + std::to_string(k));
    expect_same_bytes(c.dtype, buffers[k].content(), written ? c.expected : c.inputs[k]);
    EXPECT_TRUE(buffers[k].guards_hold());
  }
}

void check(const Case& c, std::size_t extra, const std::vector<std::size_t>& aliased) {
  for (const Isa isa : kAllIsas)
    if (has_kernels(isa)) check_with(isa, c, extra, aliased);
}

using Kind = std::pair<DType, ReduceOp>;

/// All that are defined of numbers; complex ones are below.
std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (int dtype = 0; dtype < static_cast<int>(DType::kComplex64); ++dtype)
    for (int op = 0; op < kReduceOpCount; ++op)
      if (is_floating(static_cast<DType>(dtype)) ? !is_bitwise(static_cast<ReduceOp>(op))
                                                 : static_cast<ReduceOp>(op) != ReduceOp::kAverage)
        kinds.emplace_back(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
  return kinds;
}

class EveryDTypeAndOp : public ::testing::TestWithParam<Kind> {
 protected:
  const DType dtype = GetParam().first;
  const ReduceOp op = GetParam().second;
};

TEST_P(EveryDTypeAndOp, MatchesOracle) {
  for (const std::size_t n : kInputCounts) {
    for (const std::size_t count : kCounts) {
      for (const bool special : {false, true}) check(make_case(dtype, {op}, count, n, special), 1, {});
      if (HasFailure()) return;
    }
  }
}

TEST_P(EveryDTypeAndOp, OutputsMayBeInputs) {
  for (const std::size_t n : {1, 2, 3, 5, 8, 11}) {
    const Case c = make_case(dtype, {op}, 2053, n);
    std::vector<std::size_t> all;
    for (std::size_t k = 0; k < n; ++k) {
      all.push_back(k);
      check(c, 0, {k});
    }
    check(c, 0, all);
  }
}

TEST_P(EveryDTypeAndOp, SeveralOutputs) {
  for (const std::size_t n : {1, 2, 4, 10}) {
    const Case c = make_case(dtype, {op}, 301, n);
    for (const std::size_t extra : {0, 1, 2, 3, 5}) {
      check(c, extra, {});
      if (extra != 0) check(c, extra, {0});
    }
  }
}

TEST_P(EveryDTypeAndOp, Scaling) {
  if (dtype == DType::kBool || is_bitwise(op)) return;  // refused, see InvalidArguments
  const double infinity = std::numeric_limits<double>::infinity();
  const double factors[][2] = {{0.5, 1.0},      {1.0, 0.25},     {1.0 / 3, 3.0}, {-1.5, 1.0},
                               {1.0, 1e30},     {1e30, 1e-30},   {0.0, -2.0},    {1e300, 1e-300},
                               {infinity, 1.0}, {1.0, -infinity}};
  for (const std::size_t n : {1, 2, 3, 4, 6, 13})
    for (const auto& [prescale, postscale] : factors)
      check(make_case(dtype, {op, prescale, postscale}, 263, n), 1, {0});
}

TEST_P(EveryDTypeAndOp, SliceOfResultIsResultOfSlice) {
  const std::size_t size = dtype_size(dtype);
  for (const std::size_t n : {2, 3, 8, 19}) {
    const Case whole = make_case(dtype, {op}, 3001, n);
    for (const auto& [begin, count] : {std::pair{1, 1}, {7, 64}, {500, 513}, {13, 2900}, {2999, 2}}) {
      const auto slice = [&, first = begin * size, bytes = count * size](const Bytes& from) {
        const auto at = from.begin() + static_cast<std::ptrdiff_t>(first);
        return Bytes(at, at + static_cast<std::ptrdiff_t>(bytes));
      };
      Case part{dtype, {op}, static_cast<std::size_t>(count), {}, slice(whole.expected)};
      for (const Bytes& input : whole.inputs) part.inputs.push_back(slice(input));
      check(part, 2, {});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reduction, EveryDTypeAndOp, ::testing::ValuesIn(all_kinds()), [](const auto& info) {
  return std::string(dtype_name(info.param.first)) + "_" + reduce_op_name(info.param.second);
});

// ---- Complex numbers: sums are those of their parts.

Bytes complex_product(DType part, const Bytes& a, const Bytes& b) {
  // Products and sums as the oracle gives them: each is rounded once.
  const std::size_t size = dtype_size(part);
  const auto of = [&](const Bytes& bytes, std::size_t i) {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(i * size);
    return Bytes(begin, begin + static_cast<std::ptrdiff_t>(size));
  };
  const auto times = [&](const Bytes& x, const Bytes& y) {
    return reduce_oracle(part, {ReduceOp::kProduct}, {x, y});
  };
  const auto plus = [&](const Bytes& x, const Bytes& y) { return reduce_oracle(part, {}, {x, y}); };
  Bytes result;
  for (std::size_t i = 0; i < a.size() / size; i += 2) {
    const Bytes real = of(a, i), imaginary = of(a, i + 1), other_real = of(b, i), other = of(b, i + 1);
    Bytes minus = times(imaginary, other);
    minus.back() ^= 0x80;
    for (const Bytes& each :
         {plus(times(real, other_real), minus), plus(times(real, other), times(imaginary, other_real))})
      result.insert(result.end(), each.begin(), each.end());
  }
  return result;
}

class ComplexTest : public ::testing::TestWithParam<DType> {};

TEST_P(ComplexTest, SumsAreThoseOfTheParts) {
  const DType dtype = GetParam();
  for (const std::size_t n : kInputCounts)
    for (const std::size_t count : kCounts)
      for (const Reduction& reduction : {Reduction{}, Reduction{ReduceOp::kAverage, 0.3, -1.7}}) {
        check(make_case(dtype, reduction, count, n), 1, {0});
        if (HasFailure()) return;
      }
}

TEST_P(ComplexTest, Products) {
  const DType dtype = GetParam();
  const DType part = number_type(dtype);
  for (const std::size_t count : kCounts) {
    Case c{dtype, {ReduceOp::kProduct}, count, {}, {}};
    for (std::uint32_t k = 0; k < 3; ++k) c.inputs.push_back(random_elements(part, 2 * count, k, false));
    c.expected = complex_product(part, complex_product(part, c.inputs[0], c.inputs[1]), c.inputs[2]);
    check(c, 1, {2});
  }
}

INSTANTIATE_TEST_SUITE_P(Reduction, ComplexTest, ::testing::Values(DType::kComplex64, DType::kComplex128),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace multiring
