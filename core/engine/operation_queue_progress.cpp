// The progress thread: what it takes from the queue, and how the ranks agree on that.

#include <algorithm>
#include <system_error>

#include "engine/operation_queue.h"

namespace multiring {

void OperationQueue::start_progress() {
  if (progress_thread_.joinable()) return;
  try {
    progress_thread_ = std::thread([this] { progress(); });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(runner_.transport().rank()) +
                                          " cannot start its progress thread: " + error.what() +
                                          ". Is a limit of processes reached (ulimit -u)?");
  }
}

void OperationQueue::progress() {
  bool destroyed = false;
  std::unique_lock lock(mutex_);
  destroyed_ = &destroyed;
  for (;;) {
    changed_.wait(lock, [this] { return runner_.is_cancelled() || (!queue_.empty() && !busy_); });
    if (runner_.is_cancelled()) return;
    take_turn();
    lock.unlock();
    run_next();
    if (destroyed) return;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void OperationQueue::run_queued() {
  std::unique_lock lock(mutex_);
  while (!queue_.empty() && !runner_.is_cancelled()) {
    lock.unlock();
    run_next();
    lock.lock();
  }
  busy_ = false;
  changed_.notify_all();
}

// Ranks may have submitted different numbers of operations when they come here, and so choose differently.
// Each puts its number into its header; where choices differ, all choose again among the smallest number. If
// the numbers are equal, but fused operations differ, or a rank has held one back because of its memory, the
// first of the queue runs alone: so that an error names the operation that differs, and because which arrays
// share memory may depend on the rank.
void OperationQueue::run_next() {
  std::uint64_t limit;
  bool in_order = false;
  {
    const std::lock_guard lock(mutex_);
    limit = submitted_;
  }
  for (;;) {
    Choice choice;
    {
      const std::lock_guard lock(mutex_);
      if (!first_error_.is_set())
        choice = in_order ? choose_first(queue_, limit) : choose_work(queue_, limit, fusion_);
      if (!choice.works.empty()) running_ = choice.works;
    }
    if (choice.works.empty()) return fail_running();  // the communicator was broken meanwhile
    try {
      run_chosen(choice, limit);
      return remove_finished(choice.works);
    } catch (const ChoiceMismatch& mismatch) {
      limit = mismatch.limit;
      in_order = mismatch.in_order;
    } catch (...) {
      const std::shared_ptr<void> owner = keep_owner_();  // keeps this alive until all are notified
      fail(choice.works.front()->operation().descriptor, true);
      return fail_running();
    }
  }
}

void OperationQueue::run_chosen(const Choice& choice, std::uint64_t submitted) {
  const std::vector<std::shared_ptr<Work>>& chosen = choice.works;
  Clock::time_point now;
  for (const auto& work : chosen) work->note(&Work::Times::begun, now);
  const auto publish = [&](Descriptor& descriptor) {
    descriptor.submitted = submitted;
    descriptor.held_back = choice.is_held_back;
  };
  if (chosen.size() == 1) {
    Operation& operation = chosen[0]->running();
    publish(operation.descriptor);
    const OperationRunner::Call call(runner_, operation.descriptor, {timeout_of(chosen)});
    return runner_.run(call, operation);
  }
  std::vector<Operation*> operations;
  for (const auto& work : chosen) operations.push_back(&work->running());
  Descriptor fused = fused_descriptor(operations);
  publish(fused);
  const OperationRunner::Call call(runner_, fused, {timeout_of(chosen)});
  runner_.run_fused(call, operations);
}

/// Work that runs together waits as long as the most patient of it.
double OperationQueue::timeout_of(const std::vector<std::shared_ptr<Work>>& chosen) const {
  double longest = 0.0;
  for (const auto& work : chosen)
    longest = std::max(longest, work->timeout_ >= 0 ? work->timeout_ : runner_.timeout());
  return longest;
}

void OperationQueue::remove_finished(const std::vector<std::shared_ptr<Work>>& chosen) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(queue_, [this](const auto& work) { return is_running(work); });
    running_.clear();
  }
  // One may hold the last reference to the owner of this.
  for (const auto& work : chosen) work->finish();
}

}  // namespace multiring
