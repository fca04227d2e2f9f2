#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "engine/communicator.h"
#include "engine/first_error.h"
#include "engine/memory_in_flight.h"
#include "engine/named/name_matcher.h"
#include "engine/named/submission.h"

namespace multiring {

/// Operations that are matched by name: the ranks may submit them in any order, from any thread.
///
/// The queue has two communicators of its own. While this rank has unmatched submissions, a control thread
/// negotiates: each negotiation is one allgather of what is new on every rank (see NameMatcher). What all
/// ranks have submitted is then queued in the other communicator, in the same order on all ranks, and runs on
/// its progress thread; a small one that comes alone runs on the control thread. A rank without unmatched
/// submissions sleeps, and its peers wait for it.
///
/// A submission whose memory conflicts with that of an earlier one of this rank (MemoryInFlight) is announced
/// when that one has been matched: they run in the order of submission.
///
/// Each submission has the communicator's timeout to be matched. The first error breaks the queue on all
/// ranks: it is stored, ends all that is pending, and is raised by the first call where the program has not
/// been told of it. Later calls raise an abort that names it, but for those with a `done`, which raise it
/// too.
class MULTIRING_API NamedQueue : Immovable {
 public:
  using Works = std::vector<std::shared_ptr<Work>>;

  /// Collective over `parent`, with the same `name` everywhere.
  static std::shared_ptr<NamedQueue> create(Communicator& parent, const std::string& name,
                                            const CallOptions& call);
  /// Closes. Must not run on a thread of the queue (in a `done`, a warning), because it joins them.
  ~NamedQueue();

  /// Communicator::number of its communicators.
  std::uint64_t number() const { return data_->number(); }
  int rank() const { return data_->rank(); }
  int size() const { return data_->size(); }
  const std::string& name() const { return data_->name(); }
  std::string host() const { return data_->host(); }
  double timeout() const { return data_->timeout(); }

  /// Queues the operations of a request and returns their works. Never waits; `done` is called on a thread of
  /// the queue or inside close(), never in here. If it raises, nothing was queued.
  Works submit(NamedRequest request);
  /// Waits until the memory of `operation` conflicts with that of no operation of this queue.
  void await_queued(const Operation& operation, const CallOptions& call);
  /// Breaks the queue on all ranks.
  void abort(const Error& error);
  /// Ends this rank's part: pending work fails, peers that still need it learn that it left. Idempotent. On a
  /// thread of the queue (in a `done` or a warning) it returns false at once: the control thread does the
  /// rest, and the next call from another thread or the destructor waits for it.
  bool close();
  bool is_broken() const;
  /// To be called in a forked child: the queue belongs to the parent alone, and every call here fails.
  void abandon();

 private:
  NamedQueue(std::shared_ptr<Communicator> control, std::shared_ptr<Communicator> data);

  void prepare(NamedRequest& request) const;
  /// Queues for the control thread (one rank: in the data communicator). Throws if broken or closed.
  void enqueue(const std::shared_ptr<Submission>& submission, const ErrorSeen& error_seen);
  void throw_if_abandoned() const;
  void throw_if_unusable(const ErrorSeen& error_seen) const;  // with mutex_ held
  /// Notes what has to be matched before a submission, because it shares memory with it. With mutex_ held.
  void find_conflicts(Submission& submission);
  /// Lets those be announced that waited only for what has been matched. With mutex_ held.
  void release_held_back();
  /// Waits until nothing that is unmatched conflicts with an operation whose arrays are copied at once.
  void await_unmatched(const Operation& operation, const CallOptions& call) const;
  void start_control();  // with mutex_ held
  void run_control();
  void negotiate_until_ended();
  /// Notifies peers that this rank has left, and fails what is not matched.
  void fail_unmatched();
  bool on_queue_thread() const;
  bool negotiate();
  bool may_run_at_once(const std::vector<QueuedWork>& queued) const;
  std::vector<std::byte> encode_new();
  bool exchange_messages(std::vector<std::byte> message);
  std::vector<QueuedWork> take_matched(std::vector<std::shared_ptr<Submission>>& taken);
  /// Called by the control thread while waiting and after each negotiation: deadlines, warnings, close.
  void check_deadlines();
  /// Which submissions wait for which ranks, as far as this rank knows.
  std::string describe_unmatched() const;
  Error late_error(const Submission& late) const;
  Error with_unmatched_names(const std::exception_ptr& raised) const;
  Error mismatch_here(const Error& mismatch) const;
  void fail(const Error& error);
  std::vector<std::shared_ptr<Submission>> take_unmatched();  // with mutex_ held
  Error closed_error() const;

  const std::shared_ptr<Communicator> control_;
  const std::shared_ptr<Communicator> data_;
  FirstError first_error_;
  std::atomic<bool> closing_{false};  // written with mutex_ held
  std::atomic<bool> abandoned_{false};

  // The control thread's own.
  NameMatcher matcher_;
  std::vector<std::string> names_in_negotiation_;  // in the negotiation in progress
  Clock::time_point checked_ = Clock::now();

  std::mutex close_mutex_;  // serialises close(); mutex_ is taken while it is held
  bool closed_ = false;     // guarded by close_mutex_

  mutable std::mutex mutex_;  // guards all below; while it is held, no lock is taken but those of
                              // submissions and of first_error_
  mutable std::condition_variable changed_;
  std::unordered_map<std::string, std::deque<std::shared_ptr<Submission>>> unmatched_;  // to be matched
  std::deque<std::shared_ptr<Submission>> unannounced_;  // those of them that are not announced yet
  std::deque<std::shared_ptr<Submission>> held_back_;    // those that wait for others to be matched
  std::uint64_t submitted_ = 0;
  MemoryInFlight memory_;  // of unmatched_
  std::thread control_thread_;
  std::thread::id control_id_;  // copied, because joining resets the thread's
};

}  // namespace multiring
