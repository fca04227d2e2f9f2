#pragma once

#include <atomic>

#include "base/immovable.h"

namespace multiring {

/// Held by the one thread that handles a group's messages. Not a mutex: others do not wait for it.
class ProgressLock {
 public:
  class Guard : Immovable {
   public:
    explicit Guard(ProgressLock& lock)
        : lock_(lock), owned_(!lock.taken_.test_and_set(std::memory_order_acquire)) {}
    ~Guard() {
      if (owned_) lock_.taken_.clear(std::memory_order_release);
    }
    explicit operator bool() const { return owned_; }

   private:
    ProgressLock& lock_;
    const bool owned_;
  };

 private:
  std::atomic_flag taken_;
};

}  // namespace multiring
