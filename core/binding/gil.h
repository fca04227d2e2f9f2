#pragma once

#include <pybind11/pybind11.h>

#include "base/immovable.h"

namespace multiring::binding {

/// Releases the interpreter's lock (GIL) while it lives. Replaces pybind11's gil_scoped_release.
///
/// A thread that asks for the lock after the interpreter has begun to finalise is ended (daemon threads,
/// until CPython 3.14) by unwinding its stack, which our destructors would turn into std::terminate. Such a
/// thread stops here instead, until the process ends.
class GilRelease : Immovable {
 public:
  GilRelease();
  ~GilRelease();

 private:
  PyThreadState* state_;
};

/// Takes the lock while it lives, in any thread: every callback of native code into Python uses it.
///
/// Native threads make a Python thread state for it, and delete it afterwards, each under ForkLock. The
/// callback itself may take long, and does not hold ForkLock.
class GilAcquire : Immovable {
 public:
  GilAcquire();
  ~GilAcquire();

 private:
  const bool native_;  // this thread has no Python thread state of its own
  PyGILState_STATE state_;
};

/// Has threads that ask for the lock after the interpreter is gone stop, which would crash the process else.
void watch_interpreter(pybind11::module_& module);

}  // namespace multiring::binding
