#include "topology/canonical_tree.h"

#include <algorithm>
#include <bit>

namespace multiring {
namespace {

void add_parts(std::span<const int> ranks, Subtree node, std::vector<Subtree>& parts) {
  if (ranks.empty()) return;
  if (static_cast<int>(ranks.size()) == node.size()) {
    parts.push_back(node);
    return;
  }
  const int split = canonical_split(node);
  const auto right = std::ranges::lower_bound(ranks, split);
  const auto left_count = static_cast<std::size_t>(right - ranks.begin());
  add_parts(ranks.first(left_count), {node.begin, split}, parts);
  add_parts(ranks.subspan(left_count), {split, node.end}, parts);
}

}  // namespace

int canonical_split(Subtree node) {
  return node.begin + static_cast<int>(std::bit_floor(static_cast<unsigned>(node.size() - 1)));
}

std::vector<Subtree> canonical_parts(std::span<const int> ranks, int size) {
  std::vector<Subtree> parts;
  add_parts(ranks, {0, size}, parts);
  return parts;
}

}  // namespace multiring
