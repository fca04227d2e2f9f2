#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/export.h"
#include "engine/work.h"

namespace multiring {

/// Which allreduces run together.
struct Fusion {
  std::size_t below = 0;    ///< of fewer bytes each
  std::size_t at_most = 0;  ///< of so many bytes together
  bool any_order = false;   ///< also those that may add in any order
};

/// The next of the first `limit` operations submitted: the one of highest priority (the earliest of equals)
/// and those after it that can be fused with it. Empty if none is left. Ranks that have submitted the same
/// choose the same.
MULTIRING_API std::vector<std::shared_ptr<Work>> choose_work(const std::deque<std::shared_ptr<Work>>& queue,
                                                             std::uint64_t limit, const Fusion& fusion);

}  // namespace multiring
