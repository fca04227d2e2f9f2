#pragma once

#include <algorithm>

#include "base/deadline.h"
#include "transport/waiting.h"

namespace multiring {

/// A wait that consists of short slices. Serves what `WaitOptions` asks for between them.
class TimedWait {
 public:
  explicit TimedWait(const WaitOptions& waiting)
      : waiting_(waiting),
        last_check_(Clock::now()),
        stall_reported_(waiting.stall_after <= 0 || !waiting.stalled) {
    waiting_.deadline.start();
  }

  /// Options for a slice of at most `seconds`, which is too short for interrupts and warnings of its own.
  WaitOptions slice(double seconds) const {
    WaitOptions slice = waiting_;
    slice.interrupt = nullptr;
    slice.stalled = nullptr;
    slice.deadline = Deadline::after(std::min(seconds, waiting_.deadline.remaining()));
    return slice;
  }

  /// After a slice: whether the time is up. Checks for an interrupt, which may throw, and warns of a stall.
  bool expired() {
    constexpr double kBetweenChecks = 0.02;  // seconds
    if (waiting_.deadline.expired()) return true;
    const Clock::time_point now = Clock::now();
    if (seconds_between(last_check_, now) < kBetweenChecks) return false;
    last_check_ = now;
    waiting_.check_interrupt();
    const double waited = seconds_between(start_, now);
    if (!stall_reported_ && waited >= waiting_.stall_after) {
      stall_reported_ = true;
      (*waiting_.stalled)(waited);
    }
    return false;
  }

 private:
  const WaitOptions& waiting_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_check_;
  bool stall_reported_;
};

}  // namespace multiring
