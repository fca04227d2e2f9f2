// Properties of reduce() as literal values, independent of the oracle that reduction_test.cpp compares with.
#include <gtest/gtest.h>

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "base/arithmetic/kernels/reduce_kernels.h"
#include "base/arithmetic/reduction.h"
#include "support/oracles/reduce_oracle.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace multiring {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
constexpr DType kDTypeOf = std::is_same_v<T, std::int8_t>     ? DType::kInt8
                           : std::is_same_v<T, std::uint8_t>  ? DType::kUInt8
                           : std::is_same_v<T, std::int32_t>  ? DType::kInt32
                           : std::is_same_v<T, std::int64_t>  ? DType::kInt64
                           : std::is_same_v<T, std::uint64_t> ? DType::kUInt64
                                                              : DType::kFloat32;

/// Reduces arrays of equal length, on the instruction set that reduce() chooses.
template <typename T>
std::vector<T> reduce_all(DType dtype, const Reduction& reduction,
                          const std::vector<std::vector<T>>& inputs) {
  std::vector<const void*> in;
  for (const auto& input : inputs) in.push_back(input.data());
  std::vector<T> result(inputs[0].size());
  void* out[] = {result.data()};
  reduce(dtype, reduction, in, out, result.size());
  return result;
}

/// Reduces one element per input.
template <typename T>
T reduce_values(const Reduction& reduction, const std::vector<T>& values) {
  std::vector<std::vector<T>> inputs;
  for (const T value : values) inputs.push_back({value});
  return reduce_all<T>(kDTypeOf<T>, reduction, inputs)[0];
}

TEST(ReduceValues, OrderIsTheBalancedTree) {
  const float a = 1e8f, b = 1.0f, c = -1e8f, d = 3.0f, e = 0.1f, f = 7e-9f, g = 2e8f;
  const Reduction sum{};
  EXPECT_EQ(reduce_values<float>(sum, {a, b, c}), (a + b) + c);
  EXPECT_EQ(reduce_values<float>(sum, {a, b, c, d}), (a + b) + (c + d));
  EXPECT_NE((a + b) + (c + d), ((a + b) + c) + d);
  EXPECT_EQ(reduce_values<float>(sum, {a, b, c, d, e}), ((a + b) + (c + d)) + e);
  EXPECT_EQ(reduce_values<float>(sum, {a, b, c, d, e, f}), ((a + b) + (c + d)) + (e + f));
  EXPECT_EQ(reduce_values<float>(sum, {a, b, c, d, e, f, g}), ((a + b) + (c + d)) + ((e + f) + g));
}

TEST(ReduceValues, IntegerSumsAndProductsWrap) {
  EXPECT_EQ(reduce_values<std::int8_t>({}, {127, 1}), -128);
  EXPECT_EQ(reduce_values<std::int32_t>({}, {std::numeric_limits<std::int32_t>::max(), 1}),
            std::numeric_limits<std::int32_t>::min());
  EXPECT_EQ(reduce_values<std::int64_t>({ReduceOp::kProduct}, {std::int64_t{1} << 62, 2}),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(reduce_values<std::uint8_t>({ReduceOp::kProduct}, {255, 255}), 1);
}

TEST(ReduceValues, IntegerScalingTruncatesAndSaturates) {
  using Int64 = std::numeric_limits<std::int64_t>;
  EXPECT_EQ(reduce_values<std::int8_t>({ReduceOp::kSum, 0.5}, {7, -7}), 0);
  EXPECT_EQ(reduce_values<std::int8_t>({ReduceOp::kSum, 1.0, 0.5}, {-7, 0}), -3);
  EXPECT_EQ(reduce_values<std::int8_t>({ReduceOp::kMax, 1e9}, {1, 2}), 127);
  EXPECT_EQ(reduce_values<std::int8_t>({ReduceOp::kMax, -1e9}, {1, 2}), -128);
  EXPECT_EQ(reduce_values<std::uint8_t>({ReduceOp::kMax, -1.0}, {1, 2}), 0);
  EXPECT_EQ(reduce_values<std::int64_t>({ReduceOp::kMax, 1.0, 1e30}, {1, 2}), Int64::max());
  EXPECT_EQ(reduce_values<std::int64_t>({ReduceOp::kMin, 1.0, 1e30}, {-1, 2}), Int64::min());
  EXPECT_EQ(reduce_values<std::uint64_t>({ReduceOp::kMax, 1.0, 1e30}, {1, 2}),
            std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(reduce_values<std::int32_t>({ReduceOp::kMax, std::nan("")}, {5, 6}), 0);
}

TEST(ReduceValues, NaNAndSignedZero) {
  const float nan = std::bit_cast<float>(0xffc12345u), other = std::bit_cast<float>(0x7f812345u);
  for (const ReduceOp op :
       {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (const auto& values :
         {std::vector{nan, 1.0f}, {1.0f, other}, {nan, other}, {0.0f, nan, -kInfinity}}) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(reduce_values<float>({op}, values)), 0x7fc00000u);
    }
  }
  EXPECT_EQ(std::bit_cast<std::uint32_t>(reduce_values<float>({}, {kInfinity, -kInfinity})), 0x7fc00000u);
  // One input and nothing to compute: a copy of any bits.
  EXPECT_EQ(std::bit_cast<std::uint32_t>(reduce_values<float>({}, {nan})), 0xffc12345u);
  // Of equal values min and max keep the one of the lower input.
  EXPECT_TRUE(std::signbit(reduce_values<float>({ReduceOp::kMax}, {-0.0f, 0.0f})));
  EXPECT_FALSE(std::signbit(reduce_values<float>({ReduceOp::kMin}, {0.0f, -0.0f})));
  EXPECT_TRUE(std::signbit(reduce_values<float>({}, {-0.0f, -0.0f})));
}

/// Every bit pattern of a 16-bit dtype times one: the conversions there and back change nothing but NaNs.
void expect_round_trip(DType dtype, std::uint16_t one, std::uint16_t infinity, std::uint16_t nan) {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const std::vector<std::uint16_t> ones(all.size(), one);
  for (const Isa isa : kAllIsas) {
    if (!has_kernels(isa)) continue;
    std::vector<std::uint16_t> result(all.size());
    const void* const in[] = {all.data(), ones.data()};
    void* const out[] = {result.data()};
    reduce_with(isa, dtype, {ReduceOp::kProduct}, in, out, all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(result[i], (i & 0x7fff) > infinity ? nan : i) << isa_name(isa) << " " << dtype_name(dtype);
    }
  }
}

TEST(ReduceValues, HalfTypesRoundTrip) {
  expect_round_trip(DType::kFloat16, 0x3c00, 0x7c00, 0x7e00);
  expect_round_trip(DType::kBFloat16, 0x3f80, 0x7f80, 0x7fc0);
}

TEST(ReduceValues, HalfTypesRoundOnce) {
  const auto reduced = [](ReduceOp op, const std::vector<std::vector<std::uint16_t>>& inputs) {
    return reduce_all<std::uint16_t>(DType::kFloat16, {op}, inputs)[0];
  };
  const std::uint16_t half_unit = 0x1000;  // 2^-11, half a unit of 1.0 in float16
  // 1 + 3 * 2^-11 is a tie and rounds to 1 + 2^-9; rounding after each addition would give 1 + 2^-10.
  EXPECT_EQ(reduced(ReduceOp::kSum, {{0x3c00}, {half_unit}, {half_unit}, {half_unit}}), 0x3c02);
  EXPECT_EQ(reduced(ReduceOp::kSum, {{0x3c00}, {half_unit}}), 0x3c00);  // a tie, to even
  EXPECT_EQ(reduced(ReduceOp::kSum, {{0x3c01}, {half_unit}}), 0x3c02);  // a tie, to even
  // 65504 + 65504 fits into float32, and so does its half.
  EXPECT_EQ(reduced(ReduceOp::kAverage, {{0x7bff}, {0x7bff}}), 0x7bff);
  EXPECT_EQ(reduced(ReduceOp::kSum, {{0x7bff}, {0x7bff}}), 0x7c00);
}

TEST(ReduceValues, BoolIsAnyNonzeroByte) {
  const std::vector<std::vector<std::uint8_t>> inputs = {{0, 0, 1, 1, 2}, {0, 1, 0, 1, 4}};
  const std::vector<std::uint8_t> either = {0, 1, 1, 1, 1}, both = {0, 0, 0, 1, 1};
  EXPECT_EQ(reduce_all(DType::kBool, {ReduceOp::kSum}, inputs), either);
  EXPECT_EQ(reduce_all(DType::kBool, {ReduceOp::kMax}, inputs), either);
  EXPECT_EQ(reduce_all(DType::kBool, {ReduceOp::kMin}, inputs), both);
  EXPECT_EQ(reduce_all(DType::kBool, {ReduceOp::kProduct}, inputs), both);
}

TEST(ReduceValues, FloatModeOfTheThreadDoesNotMatter) {
  const float denormal = 1e-40f, tiny = 0x1p-30f;
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  EXPECT_EQ(reduce_values<float>({}, {1.0f, tiny}), 1.0f);
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(FE_TONEAREST);
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // flush denormal results to zero, read denormals as zero
  const float sum = reduce_values<float>({}, {denormal, denormal});
  EXPECT_EQ(_mm_getcsr() & 0x8040u, 0x8040u);
  _mm_setcsr(saved);
  EXPECT_EQ(sum, denormal + denormal);
#else
  EXPECT_EQ(reduce_values<float>({}, {denormal, denormal}), denormal + denormal);
#endif
}

TEST(ReduceValues, InvalidArguments) {
  std::uint8_t byte = 1;
  const void* const in[] = {&byte, &byte};
  void* const out[] = {&byte};
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    const auto integer = static_cast<DType>(dtype);
    if (is_floating(integer)) continue;
    EXPECT_THROW(reduce(integer, {ReduceOp::kAverage}, in, out, 1), std::invalid_argument);
  }
  EXPECT_THROW(reduce(DType::kBool, {ReduceOp::kSum, 2.0}, in, out, 1), std::invalid_argument);
  EXPECT_THROW(reduce(DType::kInt8, {ReduceOp::kBitwiseAnd, 2.0}, in, out, 1), std::invalid_argument);
  EXPECT_THROW(reduce(DType::kFloat32, {ReduceOp::kBitwiseOr}, in, out, 0), std::invalid_argument);
  EXPECT_THROW(reduce(DType::kComplex64, {ReduceOp::kMin}, in, out, 0), std::invalid_argument);
  EXPECT_THROW(reduce(DType::kComplex128, {ReduceOp::kBitwiseXor}, in, out, 0), std::invalid_argument);
  EXPECT_THROW(reduce(DType::kInt8, {static_cast<ReduceOp>(kReduceOpCount)}, in, out, 1),
               std::invalid_argument);
  EXPECT_THROW(reduce(static_cast<DType>(kDTypeCount), {}, in, out, 1), std::invalid_argument);
  EXPECT_THROW(reduce(DType::kInt8, {}, {}, out, 1), std::invalid_argument);
  reduce(DType::kInt8, {}, in, {}, 1);  // no outputs: nothing to do
  EXPECT_STREQ(reduce_op_name(ReduceOp::kAverage), "average");
  EXPECT_THROW(reduce_op_name(static_cast<ReduceOp>(kReduceOpCount)), std::invalid_argument);
}

TEST(ReduceValues, InstructionSets) {
  EXPECT_TRUE(has_kernels(Isa::kPlain));
  EXPECT_TRUE(has_kernels(best_isa()));
  std::uint8_t byte = 1;
  const void* const in[] = {&byte};
  void* const out[] = {&byte};
  for (const Isa isa : kAllIsas) {
    if (has_kernels(isa)) continue;
    EXPECT_THROW(reduce_with(isa, DType::kInt8, {}, in, out, 1), std::invalid_argument);
  }
}

}  // namespace
}  // namespace multiring
