#pragma once

#include <condition_variable>
#include <mutex>

namespace multiring::testing {

/// Opens when it has been counted down. (std::latch of GCC 12 waits in ways that sanitizers do not see.)
class Latch {
 public:
  explicit Latch(int count) : count_(count) {}
  void count_down() {
    const std::lock_guard lock(mutex_);
    if (--count_ <= 0) open_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    open_.wait(lock, [this] { return count_ <= 0; });
  }

 private:
  std::mutex mutex_;  // guards count_
  std::condition_variable open_;
  int count_;
};

}  // namespace multiring::testing
