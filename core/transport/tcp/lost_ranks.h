#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>

namespace multiring::tcp {

/// World ranks whose hosts do not answer any more, as one network of this process has found: the others need
/// not find out for themselves, each after a heartbeat of its own. Any thread.
class LostRanks {
 public:
  void add(int world_rank) {
    const std::lock_guard lock(mutex_);
    if (ranks_.insert(world_rank).second) version_.fetch_add(1, std::memory_order_release);
  }
  bool contains(int world_rank) const {
    const std::lock_guard lock(mutex_);
    return ranks_.contains(world_rank);
  }
  /// Changes when a rank is added. Starts at 0.
  std::uint64_t version() const { return version_.load(std::memory_order_acquire); }

 private:
  mutable std::mutex mutex_;  // guards ranks_; no other lock is taken while it is held
  std::set<int> ranks_;
  std::atomic<std::uint64_t> version_{0};
};

}  // namespace multiring::tcp
