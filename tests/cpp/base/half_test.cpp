// Conversions between half precision and float32, for every half and around every boundary between two.

#include "base/arithmetic/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/arithmetic/kernels/reduce_kernels.h"
#include "support/oracles/reduce_oracle.h"

namespace multiring {
namespace {

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

constexpr std::uint16_t infinity_of(DType half) { return half == DType::kFloat16 ? 0x7c00 : 0x7f80; }
constexpr std::uint16_t nan_of(DType half) { return half == DType::kFloat16 ? 0x7e00 : 0x7fc0; }

float widened(DType half, std::uint16_t bits) {
  float value = 0.0F;
  widen(half, &bits, &value, 1);
  return value;
}

std::uint16_t narrowed(DType half, float value) {
  std::uint16_t bits = 0;
  narrow(half, &value, &bits, 1);
  return bits;
}

/// By the definition of the format.
double value_of(DType half, std::uint16_t bits) {
  return testing::value_at(half,
                           {static_cast<std::uint8_t>(bits & 0xff), static_cast<std::uint8_t>(bits >> 8)}, 0);
}

TEST(Half, EveryValueWidensExactlyAndComesBack) {
  for (const DType half : kHalves) {
    for (std::uint32_t magnitude = 0; magnitude <= infinity_of(half); ++magnitude) {
      const auto bits = static_cast<std::uint16_t>(magnitude);
      const double expected = value_of(half, bits);
      ASSERT_EQ(widened(half, bits), expected) << magnitude;
      ASSERT_EQ(narrowed(half, widened(half, bits)), bits);
      const auto negative = static_cast<std::uint16_t>(bits | 0x8000);
      ASSERT_EQ(widened(half, negative), -expected);
      ASSERT_TRUE(std::signbit(widened(half, negative)));
      ASSERT_EQ(narrowed(half, widened(half, negative)), negative);
    }
  }
}

TEST(Half, RoundsToNearestEven) {
  for (const DType half : kHalves) {
    for (std::uint32_t lower = 0; lower < infinity_of(half); ++lower) {
      const auto low = static_cast<std::uint16_t>(lower);
      const auto high = static_cast<std::uint16_t>(lower + 1);
      // Above the largest: half way to where the next would be.
      const bool largest = high == infinity_of(half);
      const double step = largest ? value_of(half, low) - value_of(half, static_cast<std::uint16_t>(low - 1))
                                  : value_of(half, high) - value_of(half, low);
      const auto middle = static_cast<float>(value_of(half, low) + step / 2);
      const float below = std::nextafterf(middle, 0.0F);
      const float above = std::nextafterf(middle, std::numeric_limits<float>::infinity());
      ASSERT_EQ(narrowed(half, middle), lower % 2 == 0 ? low : high) << lower;
      ASSERT_EQ(narrowed(half, below), low) << lower;
      ASSERT_EQ(narrowed(half, above), high) << lower;
      ASSERT_EQ(narrowed(half, -above), high | 0x8000) << lower;
    }
    EXPECT_EQ(narrowed(half, std::numeric_limits<float>::infinity()), infinity_of(half));
    EXPECT_EQ(narrowed(half, -std::numeric_limits<float>::infinity()), infinity_of(half) | 0x8000);
    EXPECT_EQ(narrowed(half, std::numeric_limits<float>::denorm_min()), 0);
  }
}

TEST(Half, NaN) {
  for (const DType half : kHalves) {
    EXPECT_EQ(narrowed(half, std::numeric_limits<float>::quiet_NaN()), nan_of(half));
    EXPECT_EQ(narrowed(half, -std::numeric_limits<float>::quiet_NaN()), nan_of(half));
    for (std::uint32_t bits = infinity_of(half) + 1U; bits < 0x8000; ++bits)
      ASSERT_TRUE(std::isnan(widened(half, static_cast<std::uint16_t>(bits)))) << bits;
  }
}

TEST(Half, ManyAtOnceAndNotAligned) {
  for (const DType half : kHalves) {
    std::vector<unsigned char> halves(1 + 2 * 1000);
    std::vector<unsigned char> floats(1 + 4 * 1000);
    std::vector<unsigned char> back(halves.size(), 0);
    for (std::size_t index = 1; index < halves.size(); ++index)
      halves[index] = static_cast<unsigned char>(index * 37 % 0x7b);  // no NaN
    widen(half, halves.data() + 1, floats.data() + 1, 1000);
    narrow(half, floats.data() + 1, back.data() + 1, 1000);
    EXPECT_TRUE(std::equal(halves.begin() + 1, halves.end(), back.begin() + 1));
  }
}

// What the tests above find of one processor's kernels holds for all.
TEST(Half, EveryProcessorGivesTheSameBits) {
  std::vector<std::uint16_t> halves(1 << 16);
  for (std::size_t bits = 0; bits < halves.size(); ++bits) halves[bits] = static_cast<std::uint16_t>(bits);
  std::vector<std::uint32_t> floats;
  for (std::uint64_t bits = 0; bits <= 0xffffffffU; bits += 4093)
    floats.push_back(static_cast<std::uint32_t>(bits));
  // Around every boundary of bfloat16, and many of float16.
  for (std::uint32_t bits = 0; bits < 0xffffU; ++bits)
    for (const std::uint32_t low : {0x0fffU, 0x1000U, 0x1001U, 0x7fffU, 0x8000U, 0x8001U})
      floats.push_back((bits << 16) + low);
  for (const DType half : kHalves) {
    std::vector<std::uint32_t> widened(halves.size());
    std::vector<std::uint16_t> narrowed(floats.size());
    widen(half, halves.data(), widened.data(), halves.size());
    narrow(half, floats.data(), narrowed.data(), floats.size());
    for (const Isa isa : kAllIsas) {
      if (!has_kernels(isa)) continue;
      for (const std::size_t less : {0, 1, 7, 13}) {
        std::vector<std::uint32_t> wide(halves.size() - less);
        std::vector<std::uint16_t> narrow_ones(floats.size() - less);
        widen_with(isa, half, halves.data() + less, wide.data(), wide.size());
        narrow_with(isa, half, floats.data() + less, narrow_ones.data(), narrow_ones.size());
        const auto shift = static_cast<std::ptrdiff_t>(less);
        EXPECT_TRUE(std::equal(wide.begin(), wide.end(), widened.begin() + shift)) << isa_name(isa);
        EXPECT_TRUE(std::equal(narrow_ones.begin(), narrow_ones.end(), narrowed.begin() + shift))
            << isa_name(isa);
      }
    }
  }
}

}  // namespace
}  // namespace multiring
