#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "base/deadline.h"
#include "base/error.h"
#include "base/export.h"
#include "collective/operation.h"

namespace multiring {

/// Notified when work ends, on the thread that ends it, while no lock is held. Must not throw.
class WorkObserver {
 public:
  virtual ~WorkObserver() = default;
  /// Before the failure becomes visible.
  virtual void failing(const Error& error) = 0;
  /// After the end is visible; with the error if it failed.
  virtual void ended(const Error* error) = 0;
};

/// Whether the program on this rank has been told of the first error of a communicator or a named queue.
/// Until then a call raises that error itself, as what was pending does: which of them meets it first is a
/// matter of time. Later calls raise that it is broken.
using ErrorSeen = std::shared_ptr<std::atomic<bool>>;

/// An asynchronous operation: the only handle to its completion, its result and its error.
class MULTIRING_API Work {
 public:
  /// When it was made, queued to run, begun and ended; a moment that has not come, or was not kept, is zero.
  struct Times {
    Clock::time_point made, queued, begun, ended;
  };

  /// Work that is still to be queued: Communicator::enqueue. `wait` notes in `told` that it raises its error.
  Work(Operation operation, std::shared_ptr<void> keep_alive, ErrorSeen error_seen,
       std::shared_ptr<WorkObserver> observer = nullptr)
      : operation_(std::move(operation)),
        keep_alive_(std::move(keep_alive)),
        error_seen_(std::move(error_seen)),
        observer_(std::move(observer)) {
    if (keeps_times_.load(std::memory_order_relaxed)) times_.made = Clock::now();
  }

  /// Whether work that is made from now on keeps its times: while a timeline is written.
  static void keep_times(bool kept) { keeps_times_.store(kept, std::memory_order_relaxed); }

  bool done() const { return state_.load(std::memory_order_acquire) != kPending; }
  /// Adds to the timeout error of a wait what is known of its cause.
  using Explain = std::function<std::string(ErrorContext& context)>;
  /// Returns when the operation is complete; raises its error, or a timeout error (the operation goes on),
  /// which names the ranks that are late where Communicator::wait is called instead.
  void wait(const Deadline& deadline, const std::function<void()>& interrupt, const Explain& explain = {});

  const Operation& operation() const { return operation_; }
  int priority() const { return priority_; }
  /// 1 for the first asynchronous operation of the communicator.
  std::uint64_t index() const { return index_; }
  /// The operation runs when all up to this one have ended, because it shares memory with one of them.
  std::uint64_t after() const { return after_; }
  /// To be read when it is done.
  const Times& times() const { return times_; }
  /// The finished operation, to take its result from.
  Operation& take_result() { return operation_; }

 private:
  friend class OperationQueue;
  friend class Submission;
  static constexpr std::uint32_t kPending = 0;
  static constexpr std::uint32_t kDone = 1;
  static constexpr std::uint32_t kFailed = 2;

  static std::atomic<bool> keeps_times_;

  Operation& running() { return operation_; }
  /// `now` is read from the clock by the first of those that a moment is common to.
  void note(Clock::time_point Times::* moment, Clock::time_point& now) {
    if (times_.made == Clock::time_point{}) return;
    if (now == Clock::time_point{}) now = Clock::now();
    times_.*moment = now;
  }
  void finish();
  void fail(const Error& error);

  Operation operation_;
  int priority_ = 0;         // written when it is queued
  double timeout_ = -1.0;    // likewise
  std::uint64_t index_ = 0;  // likewise
  std::uint64_t after_ = 0;  // likewise
  std::shared_ptr<void> keep_alive_;
  const ErrorSeen error_seen_;
  const std::shared_ptr<WorkObserver> observer_;  // may be null
  Times times_;                 // each written before state_ (release), read after (acquire)
  std::optional<Error> error_;  // written before state_ becomes kFailed (release), read after (acquire)
  std::atomic<std::uint32_t> state_{kPending};
};

}  // namespace multiring
