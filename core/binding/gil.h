#pragma once

#include <Python.h>

namespace multiring::binding {

/// Lets go of the interpreter's lock (GIL) while it lives. Takes the place of pybind11's gil_scoped_release.
///
/// A thread that asks for the lock when the interpreter has begun to finalise is ended by it (daemon threads,
/// until CPython 3.14): by unwinding its stack, which our destructors would turn into std::terminate, and
/// which would run code on what is gone. Such a thread stops here instead, until the process ends.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

/// Takes the lock while it lives, in any thread: every callback of native code into Python does so by this.
///
/// Native threads make a Python thread state for it, and delete it afterwards. A child that is forked
/// meanwhile waits for ever for the interpreter's list of them (CPython 3.11): forks and this keep out of
/// each other's way (`ForkGate`), but not for what the callback does in between, which may take long.
class GilAcquire {
 public:
  GilAcquire();
  ~GilAcquire();
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  const bool native_;  // this thread has no Python thread state of its own
  PyGILState_STATE state_;
};

}  // namespace multiring::binding
