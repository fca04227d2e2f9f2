#include "support/modes.h"

#include <algorithm>

namespace multiring::testing {

std::vector<std::string> modes_of_all(const std::string& pattern, Order order, bool has_blocks) {
  const std::size_t index = pattern.find('?');
  const bool is_last = index + 1 == pattern.size();
  std::vector<std::string> modes;
  for (const Algorithm algorithm : kAllAlgorithms) {
    const AlgorithmTraits& traits = traits_of(algorithm);
    if (has_blocks && traits.reducing_phase != Phase::kReduceScatter) continue;
    if (!is_last && traits.reducing_phase == Phase::kAllreduce) continue;
    std::string mode = pattern;
    mode[index] = traits.letter;
    if (order == Order::kAny || std::ranges::none_of(parse_mode(mode), needs_any_order))
      modes.push_back(mode);
  }
  return modes;
}

}  // namespace multiring::testing
