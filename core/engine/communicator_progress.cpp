// The progress thread of a communicator: what it takes from the queue, and how the ranks agree on that.

#include <algorithm>
#include <system_error>

#include "engine/choose_work.h"
#include "engine/communicator.h"

namespace multiring {

void Communicator::start_progress() {
  if (progress_thread_.joinable()) return;
  try {
    progress_thread_ = std::thread([this] { progress(); });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank()) +
                                          " cannot start its progress thread: " + error.what() +
                                          ". Is a limit of processes reached (ulimit -u)?");
  }
}

void Communicator::progress() {
  bool destroyed = false;
  std::unique_lock lock(mutex_);
  destroyed_ = &destroyed;
  for (;;) {
    changed_.wait(lock,
                  [this] { return closing_.load(std::memory_order_relaxed) || (!queue_.empty() && !busy_); });
    if (closing_.load(std::memory_order_relaxed)) return;
    hold_exchange();
    lock.unlock();
    execute_chosen();
    if (destroyed) return;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void Communicator::hold_exchange() {
  busy_ = true;
  busy_thread_ = std::this_thread::get_id();
}

void Communicator::run_queued() {
  std::unique_lock lock(mutex_);
  while (!queue_.empty() && !closing_.load(std::memory_order_relaxed)) {
    lock.unlock();
    execute_chosen();
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
void Communicator::execute_chosen() {
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
      // What is fused depends on time, and across hosts so would the bits of a sum in any order.
      const Fusion fusion{
          .below = options_.fuse_below,
          .at_most = options_.fuse_at_most > 0 ? options_.fuse_at_most : transport_->staging_bytes(),
          .any_order = transport_->shares_memory()};
      if (!first_error_) choice = in_order ? choose_first(queue_, limit) : choose_work(queue_, limit, fusion);
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
      const auto self = weak_from_this().lock();  // keeps this alive until all are notified
      fail_operation(choice.works.front()->operation().descriptor);
      return fail_running();
    }
  }
}

void Communicator::run_chosen(const Choice& choice, std::uint64_t submitted) {
  const std::vector<std::shared_ptr<Work>>& chosen = choice.works;
  std::function<void(double)> stalled;
  Clock::time_point now;
  for (const auto& work : chosen) work->note(&Work::Times::begun, now);
  if (chosen.size() == 1) {
    Operation& operation = chosen[0]->running();
    operation.descriptor.submitted = submitted;
    operation.descriptor.held_back = choice.is_held_back;
    const OperationCall call = make_call(operation.descriptor, {timeout_of(chosen)}, stalled);
    exchange_.throw_if_aborted(call);
    return dispatch(call, operation);
  }
  std::vector<Operation*> operations;
  for (const auto& work : chosen) operations.push_back(&work->running());
  Descriptor fused = fused_descriptor(operations);
  fused.submitted = submitted;
  fused.held_back = choice.is_held_back;
  const OperationCall call = make_call(fused, {timeout_of(chosen)}, stalled);
  exchange_.throw_if_aborted(call);
  dispatch_fused(call, operations);
}

/// Work that runs together waits as long as the most patient of it.
double Communicator::timeout_of(const std::vector<std::shared_ptr<Work>>& chosen) const {
  double longest = 0.0;
  for (const auto& work : chosen)
    longest = std::max(longest, work->timeout_ >= 0 ? work->timeout_ : timeout());
  return longest;
}

void Communicator::remove_finished(const std::vector<std::shared_ptr<Work>>& chosen) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(queue_, [this](const auto& work) { return is_running(work); });
    running_.clear();
  }
  // One may hold the last reference to this.
  for (const auto& work : chosen) work->finish();
}

}  // namespace multiring
