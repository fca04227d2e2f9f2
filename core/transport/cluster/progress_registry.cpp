#include "transport/cluster/progress_registry.h"

#include <algorithm>

#include "base/deadline.h"

namespace multiring {
namespace {

// As often as waits check for interrupts.
constexpr auto kBetweenPolls = std::chrono::milliseconds(20);

}  // namespace

ProgressRegistry::Entry::Entry(std::shared_ptr<ProgressRegistry> registry, std::function<void()> poll)
    : registry_(std::move(registry)), poll_(std::move(poll)) {
  const std::lock_guard lock(registry_->mutex_);
  registry_->entries_.push_back(this);
}

ProgressRegistry::Entry::~Entry() {
  const std::lock_guard lock(registry_->mutex_);
  std::erase(registry_->entries_, this);
}

void ProgressRegistry::poll() {
  const auto now = Clock::now().time_since_epoch();
  if (now.count() < next_poll_.load(std::memory_order_relaxed)) return;
  next_poll_.store((now + kBetweenPolls).count(), std::memory_order_relaxed);
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  for (const Entry* entry : entries_) entry->poll();
}

}  // namespace multiring
