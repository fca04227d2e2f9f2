#include "base/arithmetic/kernels/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace multiring {
namespace {

using Copy = void (*)(void*, const void*, std::size_t);

constexpr std::size_t kGuard = 64;
constexpr std::uint8_t kGuardByte = 0xa5;

class CopyTest : public ::testing::TestWithParam<Copy> {};

TEST_P(CopyTest, CopiesEveryCountBetweenAnyTwoAddressesAndNothingBeside) {
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 2048, 2049, 2111, 2112, 4099, 12345}) {
    std::vector<std::uint8_t> from(4096 + bytes);
    std::iota(from.begin(), from.end(), std::uint8_t{1});
    for (const std::size_t distance : {0, 1, 4, 16, 31, 32, 33, 63, 64, 2048}) {
      std::vector<std::uint8_t> to(4096 + 2 * kGuard + bytes + 4096, kGuardByte);
      // The distance between the two ranges is counted within a page.
      const auto source = reinterpret_cast<std::uintptr_t>(from.data()) + 5;
      const auto begin = reinterpret_cast<std::uintptr_t>(to.data()) + kGuard;
      const std::size_t offset = kGuard + (source + distance - begin) % 4096;
      GetParam()(to.data() + offset, from.data() + 5, bytes);
      const std::string what = std::to_string(bytes) + " bytes, distance " + std::to_string(distance);
      EXPECT_TRUE(std::equal(from.begin() + 5, from.begin() + 5 + static_cast<std::ptrdiff_t>(bytes),
                             to.begin() + static_cast<std::ptrdiff_t>(offset)))
          << what;
      std::fill_n(to.begin() + static_cast<std::ptrdiff_t>(offset), bytes, kGuardByte);
      EXPECT_EQ(to, std::vector<std::uint8_t>(to.size(), kGuardByte)) << what;
    }
  }
}

TEST(CopyBytesTest, NoBytesNeedNoMemory) { copy_bytes(nullptr, nullptr, 0); }

INSTANTIATE_TEST_SUITE_P(, CopyTest, ::testing::Values(&copy_bytes, &copy_streaming),
                         [](const auto& info) { return info.index == 0 ? "ThroughCaches" : "Streaming"; });

}  // namespace
}  // namespace multiring
