#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

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
  void arrive_and_wait() {
    count_down();
    wait();
  }

 private:
  std::mutex mutex_;  // guards count_
  std::condition_variable open_;
  int count_;
};

/// Calls `body` with each of 0 ... count - 1, in a thread each, and waits for all of them.
template <class Body>
void in_threads(int count, const Body& body) {
  std::vector<std::jthread> threads;
  for (int index = 0; index < count; ++index) threads.emplace_back([&body, index] { body(index); });
}

}  // namespace multiring::testing
