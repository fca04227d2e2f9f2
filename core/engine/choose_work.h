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

/// The operations to run next.
struct Choice {
  std::vector<std::shared_ptr<Work>> works;  ///< one, or those that are fused; empty: no operation is left
  bool is_held_back = false;  ///< an operation had to wait for memory, which may be so on this rank alone
};

/// Returns the next of the first `limit` operations submitted: the one of highest priority (the earliest of
/// equals) and those after it that can be fused with it. An operation that shares memory with an earlier one
/// (Work::after) is not ready before that has ended. `queue` is in the order of submission. Ranks that have
/// submitted the same, with the same memory shared, choose the same.
MULTIRING_API Choice choose_work(const std::deque<std::shared_ptr<Work>>& queue, std::uint64_t limit,
                                 const Fusion& fusion);
/// Returns the first operation of the queue alone: ranks choose the same whatever memory is shared on each.
MULTIRING_API Choice choose_first(const std::deque<std::shared_ptr<Work>>& queue, std::uint64_t limit);

}  // namespace multiring
