#pragma once

#include <pybind11/pybind11.h>

#include "base/immovable.h"

namespace multiring::binding {

/// A lock between forks (exclusive) and native threads that make or delete their Python thread state
/// (shared): a child that is forked meanwhile would wait for ever for the list of thread states
/// (CPython 3.11).
class ForkLock {
 public:
  /// Held by a native thread while it makes or deletes its thread state, never with the GIL, which the
  /// forking thread has to take again. See GilAcquire.
  class Shared : Immovable {
   public:
    Shared();
    ~Shared();
  };

  /// Before a fork, with the GIL, which it releases while it waits: a second at most, since the holder may be
  /// the thread that forks.
  static void lock();
  /// After it, in parent and child.
  static void unlock();
};

void bind_fork_lock(pybind11::module_& module);

}  // namespace multiring::binding
