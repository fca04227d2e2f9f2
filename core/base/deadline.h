#pragma once

#include <algorithm>
#include <chrono>
#include <limits>

namespace multiring {

using Clock = std::chrono::steady_clock;

inline double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

/// A point in time that no blocking call waits beyond.
class Deadline {
 public:
  /// A deadline `seconds` from now; infinity and anything beyond 30 years mean never.
  static Deadline after(double seconds) {
    Deadline deadline = from_first_use(seconds);
    deadline.start();
    return deadline;
  }
  /// A deadline that starts when it is first used: an operation that never waits does not read the clock.
  static Deadline from_first_use(double seconds) {
    Deadline deadline;
    deadline.seconds_ = std::max(seconds, 0.0);
    return deadline;
  }
  static Deadline never() { return from_first_use(std::numeric_limits<double>::infinity()); }

  bool expired() const {
    start();
    return at_ != Clock::time_point::max() && Clock::now() >= at_;
  }
  double remaining() const {
    start();
    return at_ == Clock::time_point::max() ? std::numeric_limits<double>::infinity()
                                           : std::max(0.0, seconds_between(Clock::now(), at_));
  }
  /// Seconds allowed at the start, and seconds passed since.
  double allowed() const { return seconds_; }
  double elapsed() const {
    start();
    return seconds_between(start_, Clock::now());
  }

  /// Starts, if it has not yet.
  void start() const {
    if (started_) return;
    started_ = true;
    start_ = Clock::now();
    at_ = seconds_ < kForever
              ? start_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_))
              : Clock::time_point::max();
  }

 private:
  static constexpr double kForever = 30.0 * 365 * 24 * 3600;

  // Written at the first use, by the one thread that waits.
  mutable bool started_ = false;
  mutable Clock::time_point start_;
  mutable Clock::time_point at_;
  double seconds_ = 0.0;
};

}  // namespace multiring
