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
    constexpr double kForever = 30.0 * 365 * 24 * 3600;
    Deadline deadline;
    deadline.start_ = Clock::now();
    deadline.seconds_ = std::max(seconds, 0.0);
    deadline.at_ = seconds < kForever
                       ? deadline.start_ + std::chrono::duration_cast<Clock::duration>(
                                               std::chrono::duration<double>(deadline.seconds_))
                       : Clock::time_point::max();
    return deadline;
  }
  static Deadline never() { return after(std::numeric_limits<double>::infinity()); }

  bool expired() const { return at_ != Clock::time_point::max() && Clock::now() >= at_; }
  double remaining() const {
    return at_ == Clock::time_point::max() ? std::numeric_limits<double>::infinity()
                                           : std::max(0.0, seconds_between(Clock::now(), at_));
  }
  /// Seconds allowed at the start, and seconds passed since.
  double allowed() const { return seconds_; }
  double elapsed() const { return seconds_between(start_, Clock::now()); }

 private:
  Clock::time_point start_;
  Clock::time_point at_;
  double seconds_ = 0.0;
};

}  // namespace multiring
