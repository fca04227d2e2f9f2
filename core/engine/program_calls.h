#pragma once

#include <cstdint>

#include "base/export.h"

namespace multiring {

/// The calls of the program that communicate, counted so that it can be told whether one thread makes all of
/// them, and for which communicator that thread waits.
class MULTIRING_API ProgramCalls {
 public:
  struct Counts {
    int threads;             ///< that have made calls
    std::uint64_t begun;     ///< calls
    std::uint64_t waits_on;  ///< what the last call that began has been given; 0: it has ended
  };

  /// The calling thread communicates.
  static void note_thread();
  /// A call begins in this thread. `waits_on`: Communicator::number of the only communicator whose progress
  /// can end the call; 0: that is not known.
  static void begin(std::uint64_t waits_on);
  static void end();
  static Counts counts();
};

}  // namespace multiring
