// How a communicator ends: its first error, abort, close, and a fork of its process.

#include <algorithm>
#include <utility>

#include "engine/communicator.h"
#include "engine/communicator_list.h"
#include "engine/validate.h"

namespace multiring {

void Communicator::fail(const std::exception_ptr& error, const std::string& what) {
  Error stored(ErrorKind::kInternal, "unknown error in " + what);
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    stored = known;
  } catch (const std::bad_alloc&) {
    stored = Error(ErrorKind::kInternal, "rank " + std::to_string(rank()) + " is out of memory in " + what);
  } catch (const std::runtime_error& other) {
    stored =
        Error(ErrorKind::kInternal, "rank " + std::to_string(rank()) + " in " + what + ": " + other.what());
  } catch (const std::logic_error& other) {
    stored =
        Error(ErrorKind::kInternal, "rank " + std::to_string(rank()) + " in " + what + ": " + other.what());
  } catch (...) {  // raised by an interrupt callback: Ctrl-C
    stored = Error(ErrorKind::kAborted,
                   "rank " + std::to_string(rank()) + " on " + host() + " was interrupted in " + what);
  }
  ErrorContext about = stored.context();
  // Peers name the operations that they are in themselves.
  about.operation.clear();
  about.tensor.clear();
  break_by(stored, about);
}

void Communicator::break_by(const Error& stored, const ErrorContext& about) {
  std::deque<std::shared_ptr<Work>> pending;
  {
    const std::lock_guard lock(mutex_);
    if (!first_error_) first_error_ = stored;
    pending.swap(queue_);
    // Work in progress still uses its caller's memory: it fails when its thread has returned from it.
    std::erase_if(pending, [this](const auto& work) { return is_running(work); });
  }
  ErrorContext sent = about;
  const bool about_one = stored.kind() == ErrorKind::kPeerLost || stored.kind() == ErrorKind::kTimeout;
  if (about_one && sent.odd < 0) sent.odd = sent.peer;  // so that all ranks are told the same peer
  // A closing rank notifies its peers that it leaves. A usage error in an operation is an abort on the peers.
  if (!closing_.load(std::memory_order_acquire))
    transport_->abort(
        Error(stored.kind() == ErrorKind::kUsage ? ErrorKind::kAborted : stored.kind(), stored.what(), sent));
  for (const auto& work : pending) work->fail(stored);
  changed_.notify_all();
}

void Communicator::fail_and_raise(const Descriptor& descriptor) {
  fail(std::current_exception(), describe(descriptor));
  error_seen_->store(true, std::memory_order_relaxed);
  throw;
}

// Peers are told first: what devices have under way may take seconds to end. The arrays are in use until
// then.
void Communicator::fail_operation(const Descriptor& descriptor) {
  fail(std::current_exception(), describe(descriptor));
  exchange_.nccl().end_failed();
  exchange_.peer_memory().end_failed();
}

bool Communicator::is_running(const std::shared_ptr<Work>& work) const {
  return std::find(running_.begin(), running_.end(), work) != running_.end();
}

void Communicator::fail_running() {
  std::vector<std::shared_ptr<Work>> running;
  std::optional<Error> error;
  {
    const std::lock_guard lock(mutex_);
    running.swap(running_);
    error = first_error_;
  }
  for (const auto& work : running) work->fail(*error);
}

void Communicator::throw_if_unusable() const {
  if (first_error_) throw_broken("communicator '" + name() + "'", rank(), *first_error_, error_seen_);
  if (closed_ || closing_.load(std::memory_order_relaxed))
    throw Error(ErrorKind::kAborted, "communicator '" + name() + "' is closed");
}

void Communicator::abort(const std::string& message) { abort_with(Error(ErrorKind::kAborted, message)); }

void Communicator::abort_with(const Error& error) {
  throw_if_abandoned();
  break_by(error, error.context());
  error_seen_->store(true, std::memory_order_relaxed);
}

bool Communicator::runs_on_this_thread() const {
  const std::lock_guard lock(mutex_);
  return busy_ && busy_thread_ == std::this_thread::get_id();
}

bool Communicator::is_broken() const {
  if (abandoned_.load(std::memory_order_acquire)) return true;
  {
    const std::lock_guard lock(mutex_);
    if (first_error_) return true;
  }
  try {
    return transport_->aborted(nullptr);  // which may read from the network
  } catch (const Error&) {
    return true;
  }
}

void Communicator::throw_if_abandoned() const {
  // Before any lock is taken: in a forked child a lock may be held by a thread that does not exist there.
  if (abandoned_.load(std::memory_order_acquire))
    throw Error(ErrorKind::kUsage,
                "communicator '" + options_.name +
                    "' belongs to the parent process: a forked child must not use it (start "
                    "data loaders before multiring.init() or leave communication to the parent)");
}

void Communicator::abandon() {
  closing_.store(true, std::memory_order_release);
  abandoned_.store(true, std::memory_order_release);
  transport_->abandon();
}

Communicator::~Communicator() {
  CommunicatorList::remove(this);
  if (progress_thread_.get_id() == std::this_thread::get_id()) {
    *destroyed_ = true;
    progress_thread_.detach();
    const std::lock_guard lock(mutex_);
    busy_ = false;
  }
  close();
}

void Communicator::close() {
  if (abandoned_.load(std::memory_order_acquire)) {
    // A forked child does not have the thread: its handle can be neither joined nor destroyed.
    if (progress_thread_.joinable()) new std::thread(std::move(progress_thread_));
    return;
  }
  bool interrupts_own_operation;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    closing_.store(true, std::memory_order_release);
    interrupts_own_operation = busy_ && busy_thread_ == std::this_thread::get_id();
  }
  transport_->wake();
  changed_.notify_all();
  // A signal handler closes while the operation that it interrupts waits on the same stack: that operation
  // ends when the handler returns, and the destructor does the rest.
  if (interrupts_own_operation) return transport_->leave();
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(finished_, true)) return;
  }
  if (progress_thread_.joinable()) progress_thread_.join();
  std::deque<std::shared_ptr<Work>> pending;
  {
    // A call in another thread ends when it next reads closing_.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !busy_; });
    pending.swap(queue_);
  }
  for (const auto& work : pending)
    work->fail(Error(ErrorKind::kAborted, "communicator '" + name() + "' was closed before " +
                                              describe(work->operation().descriptor) + " ran"));
  transport_->leave();
  exchange_.nccl().release();
  exchange_.peer_memory().release();
}

}  // namespace multiring
