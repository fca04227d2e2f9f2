#include "topology/stripes.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace multiring {

std::vector<Range> stripe_ranges(Range range, std::span<const double> weights, std::size_t granule) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const std::size_t granules = segment_count(range.size(), granule);
  std::vector<Range> stripes;
  double before = 0.0;
  std::size_t begin = 0;
  for (std::size_t index = 0; index < weights.size(); ++index) {
    before += weights[index];
    const auto due =
        static_cast<std::size_t>(std::llround(static_cast<double>(granules) * std::min(before / total, 1.0)));
    // Rounding must lose nothing at the end, nor go backwards.
    const bool last = index + 1 == weights.size();
    const std::size_t end = last ? range.size() : std::clamp(due * granule, begin, range.size());
    stripes.push_back({range.begin + begin, range.begin + end});
    begin = end;
  }
  return stripes;
}

}  // namespace multiring
