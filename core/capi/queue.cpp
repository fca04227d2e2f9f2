#include "capi/queue.h"

#include <algorithm>
#include <string_view>
#include <utility>

using multiring::Error;
using multiring::ErrorKind;
using multiring::NamedQueue;

mr_queue::mr_queue(std::shared_ptr<NamedQueue> queue)
    : rank_(queue->rank()),
      size_(queue->size()),
      name_(queue->name()),
      host_(queue->host()),
      queue_(std::move(queue)) {}

std::shared_ptr<NamedQueue> mr_queue::get() const {
  if (abandoned_.load(std::memory_order_acquire))
    throw Error(ErrorKind::kUsage,
                "named queue '" + name_ + "' belongs to the parent process: a forked child must not use it");
  const std::lock_guard lock(mutex_);
  if (queue_ == nullptr)
    throw Error(ErrorKind::kAborted,
                "named queue '" + name_ + "' is closed on rank " + std::to_string(rank_) +
                    " (by its close(), that of its communicator or multiring.shutdown())");
  return queue_;
}

bool mr_queue::is_closed() const {
  if (abandoned_.load(std::memory_order_acquire)) return true;
  const std::lock_guard lock(mutex_);
  return queue_ == nullptr;
}

bool mr_queue::is_broken() const {
  try {
    return get()->is_broken();
  } catch (const Error&) {  // closed
    return true;
  }
}

bool mr_queue::close() {
  if (abandoned_.load(std::memory_order_acquire)) return false;
  std::shared_ptr<NamedQueue> queue;
  {
    const std::lock_guard lock(mutex_);
    queue = queue_;
  }
  if (queue == nullptr) return true;
  if (!queue->close()) return false;
  const std::lock_guard lock(mutex_);
  queue_ = nullptr;
  return true;
}

void mr_queue::abandon() {
  abandoned_.store(true, std::memory_order_release);
  // No lock, which a thread of the parent may have held. Never destroyed: its threads are not there to end.
  if (queue_ == nullptr) return;
  queue_->abandon();
  new std::shared_ptr<NamedQueue>(queue_);
}

std::int64_t mr_queue::keep(const Error& error) {
  constexpr std::size_t kMaxErrors = 16;
  static std::atomic<std::int64_t> last_number{0};
  if (abandoned_.load(std::memory_order_acquire)) return 0;  // its lock may be held for ever
  const std::lock_guard lock(mutex_);
  for (const auto& [number, known] : errors_)
    if (known.kind() == error.kind() && std::string_view(known.what()) == error.what()) return number;
  if (errors_.size() == kMaxErrors) errors_.pop_front();
  return errors_.emplace_back(++last_number, error).first;
}

std::optional<Error> mr_queue::kept(std::int64_t number) const {
  if (abandoned_.load(std::memory_order_acquire)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(errors_, number, &decltype(errors_)::value_type::first);
  if (found == errors_.end()) return std::nullopt;
  return found->second;
}
