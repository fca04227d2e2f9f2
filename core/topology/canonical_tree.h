#pragma once

#include <compare>
#include <span>
#include <vector>

#include "base/export.h"

namespace multiring {

// The canonical order of additions (base/arithmetic/reduction.h) is a binary tree over the rank numbers:
// tree(lo, hi) = tree(lo, lo + p) + tree(lo + p, hi) with p the largest power of two below hi - lo. Sums of
// some ranks may travel in place of their contributions only where they are nodes of that tree.

/// A node of the canonical tree: the ranks [begin, end). Where the order of additions is any, the sum of some
/// ranks, whichever they are: [the lowest, the lowest + how many).
struct Subtree {
  int begin = 0;
  int end = 0;
  constexpr int size() const { return end - begin; }
  constexpr auto operator<=>(const Subtree&) const = default;
};

/// Where the node [begin, end) divides: its children are [begin, split) and [split, end). At least two ranks.
MULTIRING_API int canonical_split(Subtree node);

/// The fewest nodes of the canonical tree over `size` ranks that together hold exactly `ranks` (ascending,
/// each within [0, size)), in ascending order. A holder of these contributions has to send so many sums.
MULTIRING_API std::vector<Subtree> canonical_parts(std::span<const int> ranks, int size);

}  // namespace multiring
