#include "engine/program_calls.h"

#include <atomic>

namespace multiring {
namespace {

std::atomic<int> threads{0};
std::atomic<std::uint64_t> begun{0};
std::atomic<std::uint64_t> last_waits_on{0};

}  // namespace

void ProgramCalls::note_thread() {
  static thread_local bool is_counted = false;
  if (is_counted) return;
  is_counted = true;
  threads.fetch_add(1, std::memory_order_relaxed);
}

void ProgramCalls::begin(std::uint64_t waits_on) {
  note_thread();
  begun.fetch_add(1, std::memory_order_relaxed);
  last_waits_on.store(waits_on, std::memory_order_relaxed);
}

void ProgramCalls::end() { last_waits_on.store(0, std::memory_order_relaxed); }

ProgramCalls::Counts ProgramCalls::counts() {
  return {threads.load(std::memory_order_relaxed), begun.load(std::memory_order_relaxed),
          last_waits_on.load(std::memory_order_relaxed)};
}

}  // namespace multiring
