#include "binding/fork_gate.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "binding/gil.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

// No mutex: it would be in an unknown state in the child.
constexpr int kClosed = -1;
std::atomic<int> passing{0};  // threads, or kClosed
bool closed_here = false;     // guarded by the GIL

constexpr std::chrono::microseconds kLook(100);

}  // namespace

ForkGate::Passage::Passage() {
  for (;;) {
    int now = passing.load(std::memory_order_relaxed);
    if (now != kClosed && passing.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return;
    if (now == kClosed) std::this_thread::sleep_for(kLook);
  }
}

ForkGate::Passage::~Passage() { passing.fetch_sub(1, std::memory_order_release); }

void ForkGate::close() {
  bool closed = false;
  {
    const GilRelease release;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    do {
      int nobody = 0;
      closed = passing.compare_exchange_strong(nobody, kClosed, std::memory_order_acquire);
      if (!closed) std::this_thread::sleep_for(kLook);
    } while (!closed && std::chrono::steady_clock::now() < limit);
  }
  closed_here = closed;
}

void ForkGate::open() {
  if (closed_here) passing.store(0, std::memory_order_release);
  closed_here = false;
}

void bind_fork_gate(py::module_& module) {
  module.def("before_fork", &ForkGate::close, "To be called before each fork.");
  module.def("after_fork", &ForkGate::open, "To be called after it, in parent and child.");
}

}  // namespace multiring::binding
