#include "binding/gil.h"

#include <cxxabi.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "binding/fork_lock.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

// Threads that take the lock, or are about to.
std::atomic<int> asking{0};
std::atomic<bool> ended{false};
std::thread::id ending;  // of the thread that finalises; written before `ended`

[[noreturn]] void stop() {
  for (;;) ::pause();
}

struct Asking {
  Asking() { asking.fetch_add(1, std::memory_order_seq_cst); }
  ~Asking() { asking.fetch_sub(1, std::memory_order_seq_cst); }
};

/// Runs what takes the lock, which crashes where the interpreter is gone. Where it is, or ends this thread
/// instead, the thread stops here.
template <class Take>
auto take_or_stop(const Take& take) {
  try {
    const Asking counted;
    if (!ended.load(std::memory_order_seq_cst) || std::this_thread::get_id() == ending) return take();
  } catch (abi::__forced_unwind&) {
    stop();  // further unwinding would leave this function, and not to go on with it ends the process
  }
  stop();
}

PyGILState_STATE ensure() { return take_or_stop(PyGILState_Ensure); }

bool is_finalising() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

/// How long those that ask are waited for: until they see, when they next run, that the interpreter ends.
/// CPython keeps them for good from 3.14 on, where only those need time that have not begun to ask.
constexpr std::chrono::milliseconds kMaxAsking{PY_VERSION_HEX >= 0x030E0000 ? 200 : 5000};

/// From now on no other thread asks.
void note_end() {
  if (!is_finalising()) return;  // the module alone goes
  ending = std::this_thread::get_id();
  ended.store(true, std::memory_order_seq_cst);
  const auto limit = std::chrono::steady_clock::now() + kMaxAsking;
  while (asking.load(std::memory_order_seq_cst) > 0 && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

}  // namespace

GilRelease::GilRelease() : state_(PyEval_SaveThread()) {}

GilRelease::~GilRelease() {
  take_or_stop([this] { PyEval_RestoreThread(state_); });
}

GilAcquire::GilAcquire() : native_(PyGILState_GetThisThreadState() == nullptr) {
  if (!native_) {
    state_ = ensure();
    return;
  }
  const ForkLock::Shared shared;
  state_ = ensure();
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

void watch_interpreter(py::module_& module) {
  // Threads that were asking in the parent are not in the child.
  ::pthread_atfork(nullptr, nullptr, [] { asking.store(0, std::memory_order_seq_cst); });
  // Modules are cleared after the interpreter has begun to end and before its state is gone.
  module.attr("_interpreter") = py::capsule(&ended, [](void*) { note_end(); });
}

}  // namespace multiring::binding
