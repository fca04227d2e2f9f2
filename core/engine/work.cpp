#include "engine/work.h"

#include <algorithm>

#include "base/futex.h"
#include "collective/kinds.h"

namespace multiring {

std::atomic<bool> Work::keeps_times_{false};

void Work::wait(const Deadline& deadline, const std::function<void()>& interrupt, const Explain& explain) {
  constexpr double kTick = 0.05;
  while (!done()) {
    futex_wait(state_, kPending, std::min(kTick, deadline.remaining()));
    if (done()) break;
    if (interrupt) interrupt();
    if (deadline.expired()) {
      ErrorContext context;
      context.operation = traits_of(operation_.descriptor).name;
      context.tensor = operation_.descriptor.name_view();
      context.elapsed = deadline.elapsed();
      const std::string cause = explain ? explain(context) : std::string();
      throw Error(ErrorKind::kTimeout,
                  describe(operation_.descriptor) + " was not complete after " +
                      std::to_string(deadline.allowed()) + " s of waiting" + cause +
                      "; it goes on, wait again or give more time",
                  context);
    }
  }
  // Every waiter gets an exception of its own: nothing of it is shared between threads.
  if (state_.load(std::memory_order_acquire) != kFailed) return;
  error_seen_->store(true, std::memory_order_relaxed);
  throw Error(error_->kind(), error_->what(), error_->context());
}

void Work::finish() {
  Clock::time_point now;
  note(&Times::ended, now);
  state_.store(kDone, std::memory_order_release);
  futex_wake_all(state_);
  if (observer_ != nullptr) observer_->ended(nullptr);
}

void Work::fail(const Error& error) {
  Clock::time_point now;
  note(&Times::ended, now);
  error_.emplace(error.kind(), error.what(), error.context());
  if (observer_ != nullptr) observer_->failing(*error_);
  state_.store(kFailed, std::memory_order_release);
  futex_wake_all(state_);
  if (observer_ != nullptr) observer_->ended(&*error_);
}

}  // namespace multiring
