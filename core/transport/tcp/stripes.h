#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace multiring::tcp {

/// The part of a message that one connection carries.
struct StripeRange {
  std::size_t stripe = 0;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

/// Divides a message of `bytes` among connections in proportion to `weights` (none negative, not all 0), cut
/// at cache lines. Shorter ones than `whole_below` go over the heaviest connection alone: a second one would
/// cost more calls than it saves time. `ranges` gets at least one range, also for an empty message.
inline void divide_into_stripes(std::size_t bytes, std::span<const std::uint32_t> weights,
                                std::size_t whole_below, std::vector<StripeRange>& ranges) {
  constexpr std::size_t kLine = 64;
  ranges.clear();
  const auto heaviest =
      static_cast<std::size_t>(std::max_element(weights.begin(), weights.end()) - weights.begin());
  double total = 0;
  for (const std::uint32_t weight : weights) total += weight;
  if (weights.size() > 1 && bytes >= whole_below) {
    double sum = 0;
    std::size_t begin = 0;
    for (std::size_t stripe = 0; stripe < weights.size(); ++stripe) {
      sum += weights[stripe];
      std::size_t end = bytes;
      if (sum < total)
        end = std::min(bytes,
                       static_cast<std::size_t>(static_cast<double>(bytes) * (sum / total)) / kLine * kLine);
      if (end > begin) ranges.push_back({stripe, begin, end - begin});
      begin = std::max(begin, end);
    }
  }
  if (ranges.empty()) ranges.push_back({heaviest, 0, bytes});
}

}  // namespace multiring::tcp
