#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "engine/choose_work.h"
#include "engine/first_error.h"
#include "engine/memory_in_flight.h"
#include "engine/operation_runner.h"
#include "engine/work.h"

namespace multiring {

/// Work to be queued.
struct QueuedWork {
  std::shared_ptr<Work> work;
  int priority = 0;
  double timeout = -1.0;  ///< seconds from when it begins; negative: the communicator's default
};

/// The order in which the collectives of a communicator run, one at a time and alike on all ranks:
/// asynchronous ones from the queue, on a progress thread that sleeps when there are none; a synchronous one
/// in the thread that calls it, after all that have been queued before. The first error fails what is queued.
///
/// Thread-safe.
class MULTIRING_API OperationQueue : Immovable {
 public:
  /// `keep_owner` returns a reference to the owner of the queue, or null where its destructor runs.
  OperationQueue(OperationRunner& runner, FirstError& first_error,
                 std::function<std::shared_ptr<void>()> keep_owner);

  /// Queues work of completed operations, all or (where it raises) none. `runs_here`: it runs in this thread,
  /// unless another one is at work.
  void enqueue(std::span<const QueuedWork> queued, bool runs_here);
  /// Returns the number of the last queued operation whose memory conflicts with that of `operation`; 0:
  /// none.
  std::uint64_t last_conflict(const Operation& operation) const;
  /// Waits until the operations up to number `last` have ended; raises the error that broke the communicator.
  void await(std::uint64_t last, const CallOptions& options);
  bool is_idle() const;
  /// Calls `body` unless operations are in progress, and lets none begin meanwhile. Returns whether it did.
  template <class Body>
  bool if_idle(const Body& body) {
    const std::lock_guard lock(mutex_);
    throw_if_unusable();
    if (!is_idle_now()) return false;
    body();
    return true;
  }
  /// Whether this thread runs an operation, and so is in a callback of it.
  bool runs_on_this_thread() const;
  /// Whether `work` is in progress. If it is not, adds to `text` behind what it waits.
  bool describe_turn(const Work& work, std::string& text) const;
  void throw_if_unusable() const;

  /// Stores an error, sends it to the peers, and fails all work except that in progress. `about`: what the
  /// peers are told of it besides its text.
  void break_by(const Error& error, const ErrorContext& about);
  /// Breaks by the exception that is being handled, which an operation has raised, and raises it to the
  /// program. `begun`: it is a collective that has begun, in the thread that ran it.
  [[noreturn]] void fail_and_raise(const Descriptor& descriptor, bool begun = false);

  /// Ends all work. Returns whether that has been done; else another call does it, or the destructor of the
  /// owner: this one interrupts an operation of its own thread.
  bool close();
  /// To be called first in the destructor of the owner, which may run on the progress thread.
  void release_thread();
  /// To be called at the end in a forked child, which does not have the thread.
  void abandon_thread();

 private:
  friend class OperationLock;

  /// How long a wait for other threads sleeps before it looks at interrupts and deadlines.
  static constexpr std::chrono::duration<double> kTick{0.05};

  CallOptions lock(const Operation& operation, const CallOptions& options);
  void unlock();
  [[noreturn]] void throw_lock_timeout(const Operation& operation, const Work* before,
                                       const Deadline& deadline) const;
  void fail(const Descriptor& descriptor, bool begun);
  void fail_running();
  void start_progress();
  void progress();
  /// Runs all that is queued in this thread, whose turn it is.
  void run_queued();
  void run_next();
  void run_chosen(const Choice& choice, std::uint64_t submitted);
  void remove_finished(const std::vector<std::shared_ptr<Work>>& chosen);
  double timeout_of(const std::vector<std::shared_ptr<Work>>& chosen) const;

  // With mutex_ held.
  void take_turn();
  bool is_own_turn() const { return busy_ && busy_thread_ == std::this_thread::get_id(); }
  bool is_idle_now() const { return !busy_ && queue_.empty(); }
  bool is_running(const std::shared_ptr<Work>& work) const;
  std::uint64_t oldest() const { return queue_.empty() ? submitted_ + 1 : queue_.front()->index(); }

  OperationRunner& runner_;
  FirstError& first_error_;
  const std::function<std::shared_ptr<void>()> keep_owner_;
  const Fusion fusion_;

  mutable std::mutex mutex_;  // guards all below; while it is held, no lock is taken but that of first_error_
  std::condition_variable changed_;
  std::thread::id busy_thread_;
  bool busy_ = false;  // an operation is in progress
  std::deque<std::shared_ptr<Work>> queue_;
  std::vector<std::shared_ptr<Work>> running_;  // a part of queue_
  std::uint64_t submitted_ = 0;
  MemoryInFlight memory_;  // of queue_
  bool finished_ = false;  // close has joined and failed what was pending
  std::thread progress_thread_;
  bool* destroyed_ = nullptr;  // set where the progress thread itself destroys this
};

/// A synchronous operation's turn.
class OperationLock : Immovable {
 public:
  OperationLock(OperationQueue& queue, const Operation& operation, const CallOptions& options)
      : queue_(queue), options_(queue.lock(operation, options)) {}
  ~OperationLock() { queue_.unlock(); }
  /// The call's options with the time that is left.
  const CallOptions& options() const { return options_; }

 private:
  OperationQueue& queue_;
  const CallOptions options_;
};

}  // namespace multiring
