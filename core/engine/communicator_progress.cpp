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
  bool gone = false;
  std::unique_lock lock(mutex_);
  gone_ = &gone;
  for (;;) {
    changed_.wait(lock, [this] {
      return closing_.load(std::memory_order_relaxed) || (!queue_.empty() && !turn_taken_);
    });
    if (closing_.load(std::memory_order_relaxed)) return;
    turn_taken_ = true;
    turn_owner_ = std::this_thread::get_id();
    lock.unlock();
    execute_chosen();
    if (gone) return;
    lock.lock();
    turn_taken_ = false;
    changed_.notify_all();
  }
}

// Ranks may have submitted different numbers of operations when they come here, and so choose differently.
// Each puts its number into its header; where the choices differ, all choose anew among the least of these
// numbers. Where they have the same number and yet differ in what they fuse, they take one operation at a
// time: the one in which they differ says so by name.
void Communicator::execute_chosen() {
  std::uint64_t limit;
  bool singly = false;
  {
    const std::lock_guard lock(mutex_);
    limit = submitted_;
  }
  for (;;) {
    std::vector<std::shared_ptr<Work>> chosen;
    {
      const std::lock_guard lock(mutex_);
      const std::size_t most =
          options_.fuse_at_most > 0 ? options_.fuse_at_most : transport_->staging_bytes();
      if (!first_error_) chosen = choose_work(queue_, limit, singly ? 0 : options_.fuse_below, most);
      if (!chosen.empty()) running_ = chosen;
    }
    if (chosen.empty()) return fail_running();  // the communicator broke meanwhile
    try {
      run_chosen(chosen, limit);
      return retire(chosen);
    } catch (const NotYetAgreed& agreement) {
      limit = agreement.submitted;
      singly = agreement.singly;
    } catch (...) {
      const auto self = weak_from_this().lock();  // until all have been told
      fail(std::current_exception(), describe(chosen.front()->operation().descriptor));
      return fail_running();
    }
  }
}

void Communicator::run_chosen(const std::vector<std::shared_ptr<Work>>& chosen, std::uint64_t submitted) {
  std::function<void(double)> stalled;
  if (chosen.size() == 1) {
    Operation& operation = chosen[0]->running();
    operation.descriptor.submitted = submitted;
    const Call call = make_call(operation.descriptor, {}, stalled);
    exchange_.throw_if_aborted(call);
    return dispatch(call, operation);
  }
  std::vector<Operation*> operations;
  for (const auto& work : chosen) operations.push_back(&work->running());
  Descriptor fused = fused_descriptor(operations);
  fused.submitted = submitted;
  const Call call = make_call(fused, {}, stalled);
  exchange_.throw_if_aborted(call);
  fused_allreduce(exchange_, call, operations);
}

void Communicator::retire(const std::vector<std::shared_ptr<Work>>& chosen) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(queue_, [this](const auto& work) { return is_running(work); });
    running_.clear();
  }
  // One may let go of the last reference to this.
  for (const auto& work : chosen) work->finish();
}

}  // namespace multiring
