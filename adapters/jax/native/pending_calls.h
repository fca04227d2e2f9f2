#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call.h"

namespace multiring::xla {

/// A submission between its two calls.
struct PendingCall {
  mr_queue* queue = nullptr;
  std::vector<const void*> memory;  // what the operations work on: the last results of `start`
  bool inside = false;              // of a branch or a loop
  bool done = false;
  std::unique_ptr<mr_error> failure;
};

/// The queues of the process by the numbers that programs contain, from 1. A program that another process has
/// compiled finds this process's queue or none. Queues stay valid to the end, so entries are never taken
/// back.
class Queues {
 public:
  static Queues& instance() {
    static auto* queues = new Queues;
    return *queues;
  }

  std::int64_t add(mr_queue* queue) {
    const std::lock_guard lock(mutex_);
    queues_.push_back(queue);
    return static_cast<std::int64_t>(queues_.size());
  }

  mr_queue* find(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number < 1 || static_cast<std::size_t>(number) > queues_.size())
      throw Failure(MR_USAGE, "the program belongs to communicator " + std::to_string(number) +
                                  ", which this process does not have: compile it anew, after "
                                  "multiring.init()");
    return queues_[static_cast<std::size_t>(number) - 1];
  }

 private:
  std::mutex mutex_;
  std::vector<mr_queue*> queues_;
};

/// The pending calls of the process by their tickets. Never destroyed: threads of a queue may outlive `main`.
class PendingTable {
 public:
  static PendingTable& instance() {
    static auto* table = new PendingTable;
    return *table;
  }

  std::uint64_t add(const std::shared_ptr<PendingCall>& pending) {
    const std::lock_guard lock(mutex_);
    calls_.emplace(++last_, pending);
    return last_;
  }

  /// The ticket of the call whose memory for it lies at an address, in the program. The host cannot read that
  /// where it is a device's, but nothing else lies there from the start of a call to its end.
  void note(const void* address, std::uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    tickets_[address] = ticket;
  }
  std::uint64_t take_ticket(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = tickets_.find(address);
    if (found == tickets_.end()) throw without_start();
    const std::uint64_t ticket = found->second;
    tickets_.erase(found);
    return ticket;
  }

  /// The step that a submission belongs to, which is counted by the first one of each step.
  std::uint64_t step(const mr_queue* queue, const std::string& counter, bool first) {
    const std::lock_guard lock(mutex_);
    std::uint64_t& count = steps_[{queue, counter}];
    return first ? ++count : count;
  }

  /// The step of a submission inside of branches and loops, given their counters from the outermost on: how
  /// often the outermost has been reached, in the lower half, and the others, in the upper half.
  std::uint64_t step_inside(const mr_queue* queue, const std::vector<std::string>& counters) {
    std::uint64_t others = 0;
    for (std::size_t i = 1; i < counters.size(); ++i) others = others * 31 + step(queue, counters[i], false);
    return others << 32 | (step(queue, counters[0], false) & 0xFFFFFFFF);
  }

  /// The number of a submission among those that all ranks submit in one order.
  std::uint64_t next_ordered(const mr_queue* queue) {
    const std::lock_guard lock(mutex_);
    return ++ordered_[queue];
  }

  void remove(std::uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    calls_.erase(ticket);
  }

  void finish(PendingCall& pending, const mr_error* error) {
    if (error != nullptr) pending.failure = std::make_unique<mr_error>(*error);
    if (error != nullptr && error->status == MR_MISMATCH && pending.inside)
      mr_queue_keep(
          pending.queue, pending.failure.get(),
          " The call is in a branch or a loop of the program: all ranks have to enter it in the same steps. "
          "multiring.jax.distribute goes around optax.apply_if_finite and the like, not into them.");
    const std::lock_guard lock(mutex_);
    pending.done = true;
    changed_.notify_all();
  }

  std::shared_ptr<PendingCall> wait_for(std::uint64_t ticket) {
    std::unique_lock lock(mutex_);
    const auto found = calls_.find(ticket);
    if (found == calls_.end() && ticket <= forgotten_)
      throw Failure(MR_ABORTED, "the collective has ended with an earlier error of its communicator");
    if (found == calls_.end()) throw without_start();
    const auto pending = found->second;
    calls_.erase(found);
    changed_.wait(lock, [&] { return pending->done; });
    return pending;
  }

  /// A program that fails gives its memory back: no operation may use it any more. What was submitted
  /// ends by itself, after an error of the communicator at once, otherwise when the peers have submitted it
  /// too or its deadline has passed. The program will not run the ends that are left: where the queue is
  /// broken, they are forgotten, for no other rank needs them.
  void wait_for_all(const mr_queue* queue, bool broken) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      for (const auto& [ticket, pending] : calls_)
        if (pending->queue == queue && !pending->done) return false;
      return true;
    });
    if (!broken) return;
    std::erase_if(calls_, [queue](const auto& entry) { return entry.second->queue == queue; });
    forgotten_ = last_;
  }

  std::size_t count() {
    const std::lock_guard lock(mutex_);
    return calls_.size();
  }

 private:
  static Failure without_start() {
    return {MR_INTERNAL, "XLA has run the end of a collective without its start, or twice"};
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<const void*, std::uint64_t> tickets_;
  std::unordered_map<std::uint64_t, std::shared_ptr<PendingCall>> calls_;
  std::map<std::pair<const mr_queue*, std::string>, std::uint64_t> steps_;
  std::map<const mr_queue*, std::uint64_t> ordered_;
  std::uint64_t last_ = 0;
  std::uint64_t forgotten_ = 0;  // tickets up to here may have been
};

using Context = std::shared_ptr<PendingCall>;

inline void on_done(void* context, const mr_error* error, mr_work* const*) {
  const std::unique_ptr<Context> pending(static_cast<Context*>(context));
  PendingTable::instance().finish(**pending, error);
}

/// Submits operations whose memory the call's program keeps. Returns the ticket to wait for them with.
inline std::uint64_t submit(const std::shared_ptr<PendingCall>& pending, const std::string& name,
                            bool ordered, std::uint64_t step, const std::vector<mr_operation>& operations) {
  PendingTable& table = PendingTable::instance();
  const std::uint64_t ticket = table.add(pending);
  auto context = std::make_unique<Context>(pending);
  mr_submission submission = MR_SUBMISSION_INIT;
  submission.name = name.c_str();
  submission.operations = operations.data();
  submission.count = static_cast<int>(operations.size());
  submission.step = step;
  submission.position = ordered ? table.next_ordered(pending->queue) : 0;
  submission.done = on_done;
  submission.context = context.get();
  mr_error error;
  if (mr_queue_submit(pending->queue, &submission, &error) == MR_OK) {
    static_cast<void>(context.release());
    return ticket;
  }
  table.remove(ticket);
  table.wait_for_all(pending->queue, mr_queue_is_broken(pending->queue) != 0);
  throw Failure(error);
}

}  // namespace multiring::xla
