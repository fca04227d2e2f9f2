#pragma once

#include <pybind11/pybind11.h>

namespace multiring::binding {

/// Keeps forks apart from native threads that make or delete their Python thread state, as each does to take
/// the GIL: a child that is forked meanwhile waits for ever for the interpreter's list of them
/// (CPython 3.11).
class ForkGate {
 public:
  /// Held by a native thread around taking the GIL. A thread that Python knows passes without.
  class Passage {
   public:
    Passage();
    ~Passage();
    Passage(const Passage&) = delete;
    Passage& operator=(const Passage&) = delete;

   private:
    const bool counted_;
  };

  /// Before a fork, with the GIL, which it lets go of while it waits: for a second at most, since what has
  /// passed may be the very thread that forks.
  static void close();
  /// After it, in parent and child.
  static void open();
};

void bind_fork_gate(pybind11::module_& module);

}  // namespace multiring::binding
