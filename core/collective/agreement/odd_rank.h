#pragma once

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace multiring {

/// Notes in the context of a mismatch who differs, and as the peer of rank `self` the first of the other
/// side. `alike(a, b)`: whether two of the `size` ranks asked for the same.
template <class Alike>
void note_odd_rank(ErrorContext& context, int self, int size, const Alike& alike) {
  struct Party {
    int first;
    int ranks;
  };
  std::vector<Party> parties;
  for (int rank = 0; rank < size; ++rank) {
    const auto found =
        std::ranges::find_if(parties, [&](const Party& party) { return alike(party.first, rank); });
    if (found == parties.end())
      parties.push_back({rank, 1});
    else
      ++found->ranks;
  }
  if (parties.size() < 2) return;
  const auto most = std::ranges::max_element(parties, {}, &Party::ranks);
  context.common = most->first;
  context.odd = parties[most == parties.begin() ? 1 : 0].first;
  context.peer = alike(context.common, self) ? context.odd : context.common;
}

}  // namespace multiring
