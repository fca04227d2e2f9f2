#pragma once

#include <algorithm>

#include "base/deadline.h"
#include "transport/transport.h"

namespace multiring {

/// A wait that is made of short turns: what `Waiting` asks for, looked after between them.
class Patience {
 public:
  explicit Patience(const Waiting& waiting)
      : waiting_(waiting), looked_(Clock::now()), stall_told_(waiting.stall_after <= 0 || !waiting.stalled) {
    waiting_.deadline.start();
  }

  /// How one turn of at most so many seconds waits: too short for interrupts and warnings of its own.
  Waiting turn(double seconds) const {
    Waiting turn = waiting_;
    turn.interrupt = nullptr;
    turn.stalled = nullptr;
    turn.deadline = Deadline::after(std::min(seconds, waiting_.deadline.remaining()));
    return turn;
  }

  /// After a turn: whether the time is up. Looks for an interrupt, which may throw, and warns.
  bool is_over() {
    constexpr double kBetweenLooks = 0.02;  // seconds
    if (waiting_.deadline.expired()) return true;
    const Clock::time_point now = Clock::now();
    if (seconds_between(looked_, now) < kBetweenLooks) return false;
    looked_ = now;
    waiting_.check_interrupt();
    const double waited = seconds_between(start_, now);
    if (!stall_told_ && waited >= waiting_.stall_after) {
      stall_told_ = true;
      (*waiting_.stalled)(waited);
    }
    return false;
  }

 private:
  const Waiting& waiting_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point looked_;
  bool stall_told_;
};

}  // namespace multiring
