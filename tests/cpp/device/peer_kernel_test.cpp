// The kernel that reduces in device memory, compiled for the host: it gives the bits of the core's kernels.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/arithmetic/reduction.h"
#include "fake_cuda/host_kernels.h"
#include "support/oracles/reduce_oracle.h"

namespace multiring {
namespace {

using namespace testing;

static_assert(kKernelDTypes == static_cast<int>(DType::kComplex64));  // which it does not reduce
static_assert(static_cast<unsigned>(ReduceOp::kSum) == peer::kSum &&
              static_cast<unsigned>(ReduceOp::kAverage) == peer::kAverage &&
              static_cast<unsigned>(ReduceOp::kMin) == peer::kMin &&
              static_cast<unsigned>(ReduceOp::kMax) == peer::kMax &&
              static_cast<unsigned>(ReduceOp::kProduct) == peer::kProduct &&
              static_cast<unsigned>(ReduceOp::kBitwiseAnd) == peer::kAnd &&
              static_cast<unsigned>(ReduceOp::kBitwiseOr) == peer::kOr &&
              static_cast<unsigned>(ReduceOp::kBitwiseXor) == peer::kXor);

bool is_defined(DType dtype, ReduceOp op) {
  return is_floating(dtype) ? !is_bitwise(op) : op != ReduceOp::kAverage;
}

peer::ReduceJob job_of(const Reduction& reduction, const std::vector<Bytes>& inputs,
                       std::vector<Bytes>& outputs, std::size_t count) {
  peer::ReduceJob job{};
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    job.inputs[rank] = inputs[rank].data();
    job.outputs[rank] = outputs[rank].data();
  }
  job.count = count;
  job.prescale = reduction.prescale;
  job.postscale = reduction.postscale;
  job.ranks = static_cast<unsigned>(inputs.size());
  job.written = job.ranks;
  job.op = static_cast<unsigned>(reduction.op);
  job.divisor = reduction.op == ReduceOp::kAverage ? job.ranks : 1;
  return job;
}

/// On elements with zeros of both signs, denormals, infinities and NaN among them, or none of these.
void compare(DType dtype, const Reduction& reduction, std::size_t ranks, std::size_t count, bool special) {
  SCOPED_TRACE(std::string(dtype_name(dtype)) + " " + reduce_op_name(reduction.op) + " of " +
               std::to_string(ranks) + " ranks, prescale " + std::to_string(reduction.prescale) +
               ", postscale " + std::to_string(reduction.postscale));
  std::vector<Bytes> inputs;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    inputs.push_back(random_elements(dtype, count, static_cast<std::uint32_t>(100 * ranks + rank), special));
  const std::vector<const void*> pointers = [&] {
    std::vector<const void*> made;
    for (const Bytes& input : inputs) made.push_back(input.data());
    return made;
  }();
  Bytes expected(inputs[0].size());
  void* const output[] = {expected.data()};
  reduce(dtype, reduction, pointers, output, count);

  std::vector<Bytes> outputs(ranks, Bytes(expected.size(), 0xee));
  reduce_on_host(static_cast<int>(dtype), job_of(reduction, inputs, outputs, count));
  for (const Bytes& each : outputs) ASSERT_EQ(each, expected);
  outputs = inputs;
  reduce_on_host(static_cast<int>(dtype), job_of(reduction, outputs, outputs, count));
  for (const Bytes& each : outputs) ASSERT_EQ(each, expected) << "in place";
  outputs.assign(ranks, Bytes(expected.size(), 0xee));
  peer::ReduceJob alone = job_of(reduction, inputs, outputs, count);
  alone.written = 1;
  reduce_on_host(static_cast<int>(dtype), alone);
  for (const Bytes& each : outputs)
    ASSERT_EQ(each, &each == outputs.data() ? expected : Bytes(expected.size(), 0xee)) << "of one rank";
}

class PeerKernelTest : public ::testing::TestWithParam<DType> {};

TEST_P(PeerKernelTest, HasTheBitsOfTheCore) {
  for (int op = 0; op < kReduceOpCount; ++op) {
    const auto reduces = static_cast<ReduceOp>(op);
    if (!is_defined(GetParam(), reduces)) continue;
    for (std::size_t ranks = 2; ranks <= peer::kMaxRanks; ++ranks)
      for (const bool special : {false, true}) {
        compare(GetParam(), {reduces}, ranks, 1031, special);
        if (HasFatalFailure()) return;
      }
  }
}

TEST_P(PeerKernelTest, ScalesAsTheCore) {
  if (GetParam() == DType::kBool) return;
  constexpr double kFactors[] = {1.0, 0.5, 1.0 / 3, -7.3, 1e30, 1e-30, 0.0};
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kProduct, ReduceOp::kMax}) {
    if (!is_defined(GetParam(), op)) continue;
    for (const double prescale : kFactors)
      for (const double postscale : kFactors)
        for (const std::size_t ranks : {1, 3, 4}) {
          if (ranks == 1 && prescale == 1.0 && postscale == 1.0) continue;  // the core copies
          compare(GetParam(), {op, prescale, postscale}, ranks, 301, true);
          if (HasFatalFailure()) return;
        }
  }
}

std::vector<DType> all_dtypes() {
  std::vector<DType> all;
  for (int dtype = 0; dtype < kKernelDTypes; ++dtype) all.push_back(static_cast<DType>(dtype));
  return all;
}

INSTANTIATE_TEST_SUITE_P(DTypes, PeerKernelTest, ::testing::ValuesIn(all_dtypes()),
                         [](const auto& param) { return std::string(dtype_name(param.param)); });

// Every value of half precision, there and back.
TEST(PeerKernelHalvesTest, AllValues) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<Bytes> inputs(2, Bytes(2 * 65536));
    for (unsigned value = 0; value < 65536; ++value)
      for (std::size_t byte = 0; byte < 2; ++byte)
        inputs[0][2 * value + byte] = static_cast<std::uint8_t>(value >> (8 * byte));
    for (const std::uint16_t other : {0x8000, 0x0001, 0x3c01, 0x7bff, 0x8403}) {
      for (std::size_t i = 0; i < inputs[1].size(); ++i)
        inputs[1][i] = static_cast<std::uint8_t>(other >> (8 * (i % 2)));
      Bytes expected(inputs[0].size());
      const void* const pointers[] = {inputs[0].data(), inputs[1].data()};
      void* const output[] = {expected.data()};
      reduce(dtype, {}, pointers, output, 65536);
      std::vector<Bytes> outputs(2, Bytes(expected.size()));
      reduce_on_host(static_cast<int>(dtype), job_of({}, inputs, outputs, 65536));
      ASSERT_EQ(outputs[0], expected) << dtype_name(dtype) << " " << other;
    }
  }
}

}  // namespace
}  // namespace multiring
