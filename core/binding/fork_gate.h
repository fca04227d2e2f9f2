#pragma once

#include <pybind11/pybind11.h>

namespace multiring::binding {

/// Keeps forks apart from native threads that make or delete their Python thread state, as each does to take
/// the GIL: a child that is forked meanwhile waits for ever for the interpreter's list of them
/// (CPython 3.11).
class ForkGate {
 public:
  /// Held by a native thread while it makes or deletes its thread state: not while it has the GIL, which the
  /// thread that forks has to get back. See GilAcquire.
  class Passage {
   public:
    Passage();
    ~Passage();
    Passage(const Passage&) = delete;
    Passage& operator=(const Passage&) = delete;
  };

  /// Before a fork, with the GIL, which it lets go of while it waits: for a second at most, since what has
  /// passed may be the very thread that forks.
  static void close();
  /// After it, in parent and child.
  static void open();
};

void bind_fork_gate(pybind11::module_& module);

}  // namespace multiring::binding
