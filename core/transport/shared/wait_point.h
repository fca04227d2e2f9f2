#pragma once

#include <atomic>
#include <cstdint>

#include "base/futex.h"

namespace multiring {

/// Where ranks sleep for a condition on shared atomics. The waker changes the condition (a seq_cst store),
/// then calls `notify_all` if there are sleepers. The sleeper counts itself, reads the epoch, checks the
/// condition again and then sleeps. In the total order of these operations either the sleeper sees the
/// changed condition or the waker sees the sleeper, so no wake is lost.
struct alignas(128) WaitPoint {
  std::atomic<std::uint32_t> epoch;
  std::atomic<std::uint32_t> sleepers;

  bool has_sleepers() const { return sleepers.load(std::memory_order_seq_cst) != 0; }
  void notify_all() {
    epoch.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(epoch);
  }
};

/// How long a wait spins before it sleeps: as long as it may after a short wait, and half as long as before
/// after a long one. Short waits avoid the cost of sleeping and waking, and long ones leave the core to
/// others. A wait that was short although it slept counts as short: ranks that sleep delay one another by the
/// time that waking takes, and would go on sleeping.
class SpinBudget {
 public:
  SpinBudget(std::uint32_t least, std::uint32_t most) : least_(least), most_(most), now_(most) {}
  std::uint32_t spins() const { return now_.load(std::memory_order_relaxed); }
  std::uint32_t most() const { return most_; }
  // Relaxed: a heuristic; a lost update only makes the next wait spin differently.
  void was_short() { now_.store(most_, std::memory_order_relaxed); }
  void was_long() { now_.store(shrunk(), std::memory_order_relaxed); }

 private:
  std::uint32_t shrunk() const { return spins() / 2 < least_ ? least_ : spins() / 2; }

  std::uint32_t least_;
  std::uint32_t most_;
  std::atomic<std::uint32_t> now_;
};

}  // namespace multiring
