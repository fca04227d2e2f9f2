#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/export.h"
#include "engine/work.h"

namespace multiring {

/// The next of the first `limit` operations submitted: the one of highest priority (the earliest of equals)
/// and, if that is an allreduce of fewer than `fuse_below` bytes, those after it that can be fused with it
/// into `fuse_at_most` bytes. Empty if none is left. Ranks that have submitted the same choose the same.
MULTIRING_API std::vector<std::shared_ptr<Work>> choose_work(const std::deque<std::shared_ptr<Work>>& queue,
                                                             std::uint64_t limit, std::size_t fuse_below,
                                                             std::size_t fuse_at_most);

}  // namespace multiring
