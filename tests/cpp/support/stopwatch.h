#pragma once

#include <map>

#include "base/deadline.h"

namespace multiring::testing {

/// Seconds since it was made, less those in which threads of this process were ready to run and did not: what
/// the code itself takes, whatever else the machine does.
///
/// For the few tests whose subject is a time. What ends a wait is told by its error, under a deadline that is
/// far away; that needs no clock.
class Stopwatch {
 public:
  Stopwatch();
  /// Of all threads that are there now: where several of them were held up at the same time, it is the less.
  double seconds() const;

 private:
  std::map<int, double> held_up_before_;  // by thread
  Clock::time_point start_;
};

}  // namespace multiring::testing
