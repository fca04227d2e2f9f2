#include "binding/gil.h"

#include <cxxabi.h>
#include <unistd.h>

#include "binding/fork_lock.h"

namespace multiring::binding {
namespace {

/// Runs what takes the lock. Where the interpreter ends this thread instead, it stops here.
template <class Take>
auto take_or_stop(const Take& take) {
  try {
    return take();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();  // further unwinding would leave this function
  }
}

}  // namespace

GilRelease::GilRelease() : state_(PyEval_SaveThread()) {}

GilRelease::~GilRelease() {
  take_or_stop([this] { PyEval_RestoreThread(state_); });
}

GilAcquire::GilAcquire() : native_(PyGILState_GetThisThreadState() == nullptr) {
  if (!native_) {
    state_ = take_or_stop([] { return PyGILState_Ensure(); });
    return;
  }
  const ForkLock::Shared shared;
  state_ = take_or_stop([] { return PyGILState_Ensure(); });
}

GilAcquire::~GilAcquire() {
  if (!native_) {
    PyGILState_Release(state_);
    return;
  }
  // Without the GIL: the forking thread waits for the holders of ForkLock, and then needs the GIL.
  PyThreadState* const state = PyEval_SaveThread();
  const ForkLock::Shared shared;
  take_or_stop([state] { PyEval_RestoreThread(state); });
  PyGILState_Release(state_);
}

}  // namespace multiring::binding
