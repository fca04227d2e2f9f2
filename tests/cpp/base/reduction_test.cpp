#include "base/arithmetic/reduction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "base/arithmetic/kernels/reduce_kernels.h"
#include "support/oracles/reduce_oracle.h"

namespace multiring {
namespace {

using namespace testing;

const std::size_t kInputCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 33, 65};
// None but the first two is a multiple of a vector; the last spans several blocks of every dtype.
const std::size_t kCounts[] = {0, 1, 37, 4099};

std::vector<Isa> isas() {
  std::vector<Isa> result;
  std::copy_if(std::begin(kAllIsas), std::end(kAllIsas), std::back_inserter(result), has_kernels);
  return result;
}

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
};

std::string describe(const Case& c, Isa isa, std::size_t inputs) {
  return std::string(isa_name(isa)) + " " + dtype_name(c.dtype) + " " + reduce_op_name(c.reduction.op) +
         " of " + std::to_string(inputs) + " inputs of " + std::to_string(c.count) + " elements, prescale " +
         std::to_string(c.reduction.prescale) + ", postscale " + std::to_string(c.reduction.postscale);
}

void expect_same_bytes(DType dtype, const Bytes& actual, const Bytes& expected) {
  if (actual == expected) return;
  const auto differ = std::mismatch(actual.begin(), actual.end(), expected.begin()).first - actual.begin();
  const std::size_t index = static_cast<std::size_t>(differ) / dtype_size(dtype);
  ADD_FAILURE() << "element " << index << " is " << value_at(dtype, actual, index) << ", expected "
                << value_at(dtype, expected, index) << " (byte " << differ << ")";
}

std::vector<Bytes> random_inputs(const Case& c, std::size_t n, bool special) {
  std::vector<Bytes> inputs;
  for (std::size_t k = 0; k < n; ++k) {
    inputs.push_back(random_elements(c.dtype, c.count, static_cast<std::uint32_t>(1000 * n + k), special));
  }
  return inputs;
}

/// Reduces on one instruction set. The outputs are `extra` buffers of their own, then the inputs numbered in
/// `aliased`; every one of them must hold `expected`, every other input what it held.
void check(Isa isa, const Case& c, const std::vector<Bytes>& inputs, const Bytes& expected, std::size_t extra,
           const std::vector<std::size_t>& aliased) {
  SCOPED_TRACE(describe(c, isa, inputs.size()) + ", outputs " + std::to_string(extra) + " + " +
               std::to_string(aliased.size()) + " in place");
  std::vector<Buffer> buffers;
  for (const Bytes& input : inputs) buffers.emplace_back(c.dtype, input);
  for (std::size_t k = 0; k < extra; ++k) buffers.emplace_back(c.dtype, Bytes(expected.size(), 0xee));
  std::vector<const void*> in;
  std::vector<void*> out;
  for (std::size_t k = 0; k < inputs.size(); ++k) in.push_back(buffers[k].data());
  for (std::size_t k = 0; k < extra; ++k) out.push_back(buffers[inputs.size() + k].data());
  for (const std::size_t k : aliased) out.push_back(buffers[k].data());
  reduce_with(isa, c.dtype, c.reduction, in, out, c.count);
  for (std::size_t k = 0; k < buffers.size(); ++k) {
    const bool written = k >= inputs.size() || std::count(aliased.begin(), aliased.end(), k) != 0;
    SCOPED_TRACE("buffer " + std::to_string(k));
    expect_same_bytes(c.dtype, buffers[k].content(), written ? expected : inputs[k]);
    EXPECT_TRUE(buffers[k].guards_hold());
  }
}

class EveryDTypeAndOp : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  DType dtype() const { return static_cast<DType>(std::get<0>(GetParam())); }
  ReduceOp op() const { return static_cast<ReduceOp>(std::get<1>(GetParam())); }
  bool defined() const { return is_floating(dtype()) || op() != ReduceOp::kAverage; }
};

TEST_P(EveryDTypeAndOp, MatchesOracle) {
  if (!defined()) return;
  for (const std::size_t n : kInputCounts) {
    for (const std::size_t count : kCounts) {
      for (const bool special : {false, true}) {
        const Case c{dtype(), {op()}, count};
        const std::vector<Bytes> inputs = random_inputs(c, n, special);
        const Bytes expected = reduce_oracle(c.dtype, c.reduction, inputs);
        for (const Isa isa : isas()) check(isa, c, inputs, expected, 1, {});
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(EveryDTypeAndOp, OutputsMayBeInputs) {
  if (!defined()) return;
  for (const std::size_t n : {1, 2, 3, 5, 8, 11}) {
    const Case c{dtype(), {op()}, 2053};
    const std::vector<Bytes> inputs = random_inputs(c, n, true);
    const Bytes expected = reduce_oracle(c.dtype, c.reduction, inputs);
    std::vector<std::size_t> all;
    for (std::size_t k = 0; k < n; ++k) all.push_back(k);
    for (const Isa isa : isas()) {
      for (std::size_t k = 0; k < n; ++k) check(isa, c, inputs, expected, 0, {k});
      check(isa, c, inputs, expected, 0, all);
    }
  }
}

TEST_P(EveryDTypeAndOp, SeveralOutputs) {
  if (!defined()) return;
  for (const std::size_t n : {1, 2, 4, 10}) {
    const Case c{dtype(), {op()}, 301};
    const std::vector<Bytes> inputs = random_inputs(c, n, true);
    const Bytes expected = reduce_oracle(c.dtype, c.reduction, inputs);
    for (const Isa isa : isas()) {
      for (const std::size_t extra : {0, 1, 2, 3, 5}) {
        check(isa, c, inputs, expected, extra, {});
        if (extra != 0) check(isa, c, inputs, expected, extra, {0});
      }
    }
  }
}

TEST_P(EveryDTypeAndOp, Scaling) {
  if (dtype() == DType::kBool || !defined()) return;  // refused, see InvalidArguments
  const double infinity = std::numeric_limits<double>::infinity();
  const double factors[][2] = {{0.5, 1.0},      {1.0, 0.25},     {1.0 / 3, 3.0}, {-1.5, 1.0},
                               {1.0, 1e30},     {1e30, 1e-30},   {0.0, -2.0},    {1e300, 1e-300},
                               {infinity, 1.0}, {1.0, -infinity}};
  for (const std::size_t n : {1, 2, 3, 4, 6, 13}) {
    for (const auto& factor : factors) {
      const Case c{dtype(), {op(), factor[0], factor[1]}, 263};
      const std::vector<Bytes> inputs = random_inputs(c, n, true);
      const Bytes expected = reduce_oracle(c.dtype, c.reduction, inputs);
      for (const Isa isa : isas()) check(isa, c, inputs, expected, 1, {0});
    }
  }
}

TEST_P(EveryDTypeAndOp, SliceOfResultIsResultOfSlice) {
  if (!defined()) return;
  const std::size_t size = dtype_size(dtype());
  for (const std::size_t n : {2, 3, 8, 19}) {
    const Case whole{dtype(), {op()}, 3001};
    const std::vector<Bytes> inputs = random_inputs(whole, n, true);
    const Bytes result = reduce_oracle(whole.dtype, whole.reduction, inputs);
    for (const auto& [begin, count] : {std::pair{1, 1}, {7, 64}, {500, 513}, {13, 2900}, {2999, 2}}) {
      const auto slice = [&, first = begin * size, bytes = count * size](const Bytes& from) {
        const auto at = from.begin() + static_cast<std::ptrdiff_t>(first);
        return Bytes(at, at + static_cast<std::ptrdiff_t>(bytes));
      };
      std::vector<Bytes> parts;
      for (const Bytes& input : inputs) parts.push_back(slice(input));
      const Case c{dtype(), {op()}, static_cast<std::size_t>(count)};
      for (const Isa isa : isas()) check(isa, c, parts, slice(result), 2, {});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Reduction, EveryDTypeAndOp,
                         ::testing::Combine(::testing::Range(0, kDTypeCount),
                                            ::testing::Range(0, kReduceOpCount)),
                         [](const auto& info) {
                           return std::string(dtype_name(static_cast<DType>(std::get<0>(info.param)))) + "_" +
                                  reduce_op_name(static_cast<ReduceOp>(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace multiring
