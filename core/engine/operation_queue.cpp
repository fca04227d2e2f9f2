#include "engine/operation_queue.h"

#include <algorithm>
#include <utility>

#include "collective/kinds.h"
#include "engine/validate.h"

namespace multiring {
namespace {

// What is fused depends on time, and across hosts so would the bits of a sum in any order.
Fusion fusion_of(const OperationRunner& runner) {
  const std::size_t at_most = runner.options().fuse_at_most;
  return {.below = runner.options().fuse_below,
          .at_most = at_most > 0 ? at_most : runner.transport().staging_bytes(),
          .any_order = runner.transport().shares_memory()};
}

}  // namespace

OperationQueue::OperationQueue(OperationRunner& runner, FirstError& first_error,
                               std::function<std::shared_ptr<void>()> keep_owner)
    : runner_(runner),
      first_error_(first_error),
      keep_owner_(std::move(keep_owner)),
      fusion_(fusion_of(runner)) {}

void OperationQueue::enqueue(std::span<const QueuedWork> queued, bool runs_here) {
  {
    Clock::time_point now;
    const std::lock_guard lock(mutex_);
    throw_if_unusable();
    runs_here = runs_here && is_idle_now();
    if (runs_here)
      take_turn();
    else
      start_progress();
    if (queue_.empty()) memory_.clear();
    for (const auto& [work, priority, timeout] : queued) {
      work->priority_ = priority;
      work->timeout_ = timeout;
      work->index_ = work->running().descriptor.key.sequence = ++submitted_;
      work->after_ = memory_.add(work->operation(), submitted_, queue_.empty() ? submitted_ : oldest());
      work->note(&Work::Times::queued, now);
      queue_.push_back(work);
    }
  }
  if (runs_here) return run_queued();
  changed_.notify_all();
}

std::uint64_t OperationQueue::last_conflict(const Operation& operation) const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? 0 : memory_.last_conflict(operation, oldest());
}

// The queued operations have deadlines of their own; what ends without success has broken the communicator.
void OperationQueue::await(std::uint64_t last, const CallOptions& options) {
  if (last == 0) return;
  std::unique_lock lock(mutex_);
  for (;;) {
    throw_if_unusable();
    if (oldest() > last) return;
    if (is_own_turn())
      throw Error(ErrorKind::kUsage, "an operation of communicator '" + runner_.options().name +
                                         "' shares memory with one that is queued, and was called where that "
                                         "cannot be waited for: in a callback or a signal handler");
    changed_.wait_for(lock, kTick);
    if (oldest() > last || options.interrupt == nullptr || !*options.interrupt) continue;
    lock.unlock();
    (*options.interrupt)();
    lock.lock();
  }
}

bool OperationQueue::is_idle() const {
  const std::lock_guard lock(mutex_);
  return is_idle_now();
}

bool OperationQueue::runs_on_this_thread() const {
  const std::lock_guard lock(mutex_);
  return is_own_turn();
}

bool OperationQueue::is_running(const std::shared_ptr<Work>& work) const {
  return std::ranges::find(running_, work) != running_.end();
}

bool OperationQueue::describe_turn(const Work& work, std::string& text) const {
  const std::lock_guard lock(mutex_);
  if (std::ranges::any_of(running_, [&](const auto& each) { return each.get() == &work; })) return true;
  if (!running_.empty()) {
    // Its kind and name only: the rest may change while it runs.
    const Descriptor& first = running_.front()->operation().descriptor;
    text += std::string(", behind ") + traits_of(first).name + " '" + std::string(first.name_view()) + "'";
  } else if (busy_) {
    text += ", behind an operation of another thread";
  }
  return false;
}

void OperationQueue::throw_if_unusable() const {
  first_error_.throw_if_set(first_error_.seen());
  if (runner_.is_cancelled())
    throw Error(ErrorKind::kAborted, "communicator '" + runner_.options().name + "' is closed");
}

void OperationQueue::take_turn() {
  busy_ = true;
  busy_thread_ = std::this_thread::get_id();
}

// Returns when all asynchronous operations submitted before are done; those have deadlines of their own, the
// call's counts only if one was given. After a timeout the peers would wait for an operation that this rank
// skips, so it is an error like one in the middle of the operation.
CallOptions OperationQueue::lock(const Operation& operation, const CallOptions& options) {
  const Deadline deadline = options.timeout >= 0 ? Deadline::after(options.timeout) : Deadline::never();
  std::unique_lock lock(mutex_);
  while (!is_idle_now()) {
    throw_if_unusable();
    if (is_own_turn())
      throw_usage(operation, "called from a signal handler that interrupts another operation of '" +
                                 runner_.options().name + "'");
    changed_.wait_for(lock, std::min(kTick, std::chrono::duration<double>(deadline.remaining())));
    if (is_idle_now()) break;
    std::shared_ptr<Work> before = queue_.empty() ? nullptr : queue_.front();
    lock.unlock();
    try {
      if (options.interrupt != nullptr && *options.interrupt) (*options.interrupt)();
      if (deadline.expired()) throw_lock_timeout(operation, before.get(), deadline);
    } catch (...) {
      fail_and_raise(operation.descriptor);
    }
    before.reset();  // without the lock: the last reference may free objects that take other locks
    lock.lock();
  }
  throw_if_unusable();
  take_turn();
  return {options.timeout >= 0 ? deadline.remaining() : options.timeout, options.interrupt};
}

void OperationQueue::unlock() {
  {
    const std::lock_guard lock(mutex_);
    busy_ = false;
  }
  changed_.notify_all();
}

void OperationQueue::throw_lock_timeout(const Operation& operation, const Work* before,
                                        const Deadline& deadline) const {
  const int rank = runner_.transport().rank();
  ErrorContext context;
  context.rank = rank;
  context.host = runner_.transport().host(rank);
  context.operation = traits_of(operation.descriptor).name;
  context.tensor = operation.descriptor.name_view();
  context.bytes = static_cast<std::int64_t>(operation.descriptor.bytes);
  context.elapsed = deadline.elapsed();
  std::string what = "an operation of another thread";
  if (before != nullptr) {  // its kind and name only: the rest may change while it runs
    const Descriptor& first = before->operation().descriptor;
    what = std::string("what was submitted before it, first ") + traits_of(first).name + " '" +
           std::string(first.name_view()) + "'";
  }
  throw Error(ErrorKind::kTimeout,
              "rank " + std::to_string(rank) + " on " + context.host + ", in " +
                  describe(operation.descriptor) + " of communicator '" + runner_.options().name +
                  "', waited " + std::to_string(deadline.elapsed()) + " s for " + what +
                  ", which is not complete. Have all ranks submitted it? MULTIRING_TIMEOUT or the timeout "
                  "argument set how long to wait.",
              context);
}

void OperationQueue::break_by(const Error& error, const ErrorContext& about) {
  std::deque<std::shared_ptr<Work>> pending;
  {
    const std::lock_guard lock(mutex_);
    first_error_.store(error);
    pending.swap(queue_);
    // Work in progress still uses its caller's memory: it fails when its thread has returned from it.
    std::erase_if(pending, [this](const auto& work) { return is_running(work); });
  }
  // A closing rank notifies its peers that it leaves.
  if (!runner_.is_cancelled()) runner_.transport().abort(FirstError::sent(error, about));
  for (const auto& work : pending) work->fail(error);
  changed_.notify_all();
}

void OperationQueue::fail(const Descriptor& descriptor, bool begun) {
  const int rank = runner_.transport().rank();
  const Error error = FirstError::caught(describe(descriptor), rank, runner_.transport().host(rank));
  ErrorContext about = error.context();
  // Peers name the operations that they are in themselves.
  about.operation.clear();
  about.tensor.clear();
  break_by(error, about);
  // Peers are told first: what devices have under way may take seconds to end. The arrays are in use until
  // then.
  if (begun) runner_.end_failed();
}

void OperationQueue::fail_and_raise(const Descriptor& descriptor, bool begun) {
  fail(descriptor, begun);
  first_error_.note_seen();
  throw;
}

void OperationQueue::fail_running() {
  std::vector<std::shared_ptr<Work>> running;
  {
    const std::lock_guard lock(mutex_);
    running.swap(running_);
  }
  const std::optional<Error> error = first_error_.get();
  for (const auto& work : running) work->fail(*error);
}

void OperationQueue::release_thread() {
  if (progress_thread_.get_id() != std::this_thread::get_id()) return;
  *destroyed_ = true;
  progress_thread_.detach();
  const std::lock_guard lock(mutex_);
  busy_ = false;
}

void OperationQueue::abandon_thread() {
  // The handle of a thread that the process does not have can be neither joined nor destroyed.
  if (progress_thread_.joinable()) new std::thread(std::move(progress_thread_));
}

bool OperationQueue::close() {
  bool interrupts_own_operation;
  {
    const std::lock_guard lock(mutex_);
    runner_.cancel();
    interrupts_own_operation = is_own_turn();
  }
  runner_.transport().wake();
  changed_.notify_all();
  // A signal handler closes while the operation that it interrupts waits on the same stack: that operation
  // ends when the handler returns, and the destructor of the owner does the rest.
  if (interrupts_own_operation) {
    runner_.transport().leave();
    return false;
  }
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(finished_, true)) return false;
  }
  if (progress_thread_.joinable()) progress_thread_.join();
  std::deque<std::shared_ptr<Work>> pending;
  {
    // A call in another thread ends when it next looks whether it is cancelled.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    pending.swap(queue_);
  }
  for (const auto& work : pending)
    work->fail(Error(ErrorKind::kAborted, "communicator '" + runner_.options().name + "' was closed before " +
                                              describe(work->operation().descriptor) + " ran"));
  runner_.transport().leave();
  return true;
}

}  // namespace multiring
