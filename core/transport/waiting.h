#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

#include "base/deadline.h"

namespace multiring {

/// How a blocking call waits: until when, and what else may end it.
struct WaitOptions {
  Deadline deadline = Deadline::never();
  /// Called every few tens of milliseconds from the waiting thread; may throw (Ctrl-C). May be null.
  const std::function<void()>* interrupt = nullptr;
  /// Called once when the wait has lasted `stall_after` seconds (0: never). May be null.
  const std::function<void(double waited)>* stalled = nullptr;
  double stall_after = 0.0;
  /// Ends the wait when set (the communicator is being closed). May be null.
  const std::atomic<bool>* cancelled = nullptr;
  /// The wait will be shorter than sleeping and waking takes.
  bool brief = false;

  void check_interrupt() const {
    if (interrupt != nullptr && *interrupt) (*interrupt)();
  }
  bool is_cancelled() const { return cancelled != nullptr && cancelled->load(std::memory_order_acquire); }
  /// The same wait with another interrupt. Starts the deadline, which otherwise only the copy would.
  WaitOptions with_interrupt(const std::function<void()>& other) const {
    deadline.start();
    WaitOptions copy = *this;
    copy.interrupt = &other;
    return copy;
  }
};

/// Why a wait ended.
struct WaitResult {
  enum class Outcome : std::uint8_t { kArrived, kTimeout, kPeerLost, kAborted, kCancelled };
  Outcome outcome = Outcome::kArrived;
  int peer = -1;           ///< kPeerLost
  bool peer_left = false;  ///< kPeerLost: it left (shutdown or exit) rather than died
  bool peer_gone = false;  ///< kPeerLost: nothing answers at its address; it may have left or died
  bool ok() const { return outcome == Outcome::kArrived; }
};

/// So often is looked, and at these distances, for the error because of which a rank has left: it may arrive
/// after the goodbye.
inline constexpr int kCauseChecks = 20;
inline constexpr std::chrono::milliseconds kBetweenCauseChecks(10);

/// Raised by calls that wait in several steps (`subgroup`, `allocate`) when one of their waits ends.
struct WaitEnded {
  WaitResult result;
};

}  // namespace multiring
