#include "binding/fork_lock.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "binding/gil.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

// No mutex: it would be in an unknown state in the child.
constexpr int kExclusive = -1;
std::atomic<int> holders{0};  // threads, or kExclusive
bool locked_here = false;     // guarded by the GIL

constexpr std::chrono::microseconds kLook(100);

}  // namespace

ForkLock::Shared::Shared() {
  for (;;) {
    int now = holders.load(std::memory_order_relaxed);
    if (now != kExclusive && holders.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return;
    if (now == kExclusive) std::this_thread::sleep_for(kLook);
  }
}

ForkLock::Shared::~Shared() { holders.fetch_sub(1, std::memory_order_release); }

void ForkLock::lock() {
  bool locked = false;
  {
    const GilRelease release;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    do {
      int none = 0;
      locked = holders.compare_exchange_strong(none, kExclusive, std::memory_order_acquire);
      if (!locked) std::this_thread::sleep_for(kLook);
    } while (!locked && std::chrono::steady_clock::now() < limit);
  }
  locked_here = locked;
}

void ForkLock::unlock() {
  if (locked_here) holders.store(0, std::memory_order_release);
  locked_here = false;
}

void bind_fork_lock(py::module_& module) {
  module.def("before_fork", &ForkLock::lock, "To be called before each fork.");
  module.def("after_fork", &ForkLock::unlock, "To be called after it, in parent and child.");
}

}  // namespace multiring::binding
