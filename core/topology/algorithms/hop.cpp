#include "topology/algorithms/hop.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace multiring {

void Hop::visit_group(const Group& group) {
  const AlgorithmTraits& traits = traits_of(step_.algorithm);
  if (static_cast<int>(number_) >= traits.hops(group.ranks.size(), across_hosts())) return;
  group_ = &group;
  traits.transfers(*this);
}

std::size_t Hop::joint_bytes(std::size_t sender, const std::vector<std::size_t>& positions) {
  if (positions.size() == 1) return held_bytes(positions[0]);
  const std::size_t from = 2 * (group_->first_holding + sender) + (positions[0] == sender ? 1 : 0);
  const auto [entry, is_new] = joint_bytes_.try_emplace(from, 0);
  if (!is_new) return entry->second;
  std::vector<int> ranks;
  for (const std::size_t position : positions) {
    const std::vector<int>& more = step_.holdings[group_->first_holding + position].ranks;
    ranks.insert(ranks.end(), more.begin(), more.end());
  }
  std::ranges::sort(ranks);
  return entry->second = plan_.holding(std::move(ranks)).bytes_per_element;
}

std::size_t Hop::joint_bytes(std::size_t sender, Range positions) {
  std::vector<std::size_t> found(positions.size());
  std::iota(found.begin(), found.end(), positions.begin);
  return joint_bytes(sender, found);
}

}  // namespace multiring
