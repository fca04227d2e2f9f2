#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/cache.h"

namespace multiring::tcp {

/// The part of a message that one connection carries.
struct StripeRange {
  std::size_t stripe = 0;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

/// Appends the parts of a message of `bytes` to `ranges`, in proportion to `weights` (none negative, not all
/// 0), cut at cache lines; at least one, also for an empty message.
inline void divide_into_stripes(std::size_t bytes, std::span<const double> weights,
                                std::vector<StripeRange>& ranges) {
  double total = 0;
  for (const double weight : weights) total += weight;
  double sum = 0;
  std::size_t begin = 0;
  std::size_t last = 0;  // with a weight
  for (std::size_t stripe = 0; stripe < weights.size(); ++stripe) {
    if (weights[stripe] > 0) last = stripe;
    sum += weights[stripe];
    std::size_t end = bytes;
    if (sum < total)
      end = std::min(bytes, static_cast<std::size_t>(static_cast<double>(bytes) * (sum / total)) /
                                kCacheLine * kCacheLine);
    if (end > begin && weights[stripe] > 0) ranges.push_back({stripe, begin, end - begin});
    begin = std::max(begin, end);
  }
  if (ranges.empty()) ranges.push_back({last, 0, bytes});
}

}  // namespace multiring::tcp
