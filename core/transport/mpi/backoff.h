#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/deadline.h"

namespace multiring {

/// Pauses of a wait that polls, since MPI cannot wake a sleeper: at first none, then longer and longer ones.
class Backoff {
 public:
  void pause() {
    if (seconds_between(start_, Clock::now()) < kYieldSeconds) {
      ::sched_yield();
      return;
    }
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, kLongest);
  }

 private:
  static constexpr double kYieldSeconds = 0.001;
  static constexpr std::chrono::microseconds kShortest{20};
  static constexpr std::chrono::microseconds kLongest{500};

  const Clock::time_point start_ = Clock::now();
  std::chrono::microseconds pause_ = kShortest;
};

}  // namespace multiring
