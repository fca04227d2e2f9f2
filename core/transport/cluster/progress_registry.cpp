#include "transport/cluster/progress_registry.h"

#include <algorithm>

#include "base/deadline.h"

namespace multiring {
namespace {

// As often as waits look for interrupts.
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

}  // namespace

MailList::Entry::Entry(std::shared_ptr<MailList> list, std::function<void()> look)
    : list_(std::move(list)), look_(std::move(look)) {
  const std::lock_guard lock(list_->mutex_);
  list_->entries_.push_back(this);
}

MailList::Entry::~Entry() {
  const std::lock_guard lock(list_->mutex_);
  std::erase(list_->entries_, this);
}

void MailList::look_now_and_then() {
  const auto now = Clock::now().time_since_epoch();
  if (now.count() < next_look_.load(std::memory_order_relaxed)) return;
  next_look_.store((now + kBetweenLooks).count(), std::memory_order_relaxed);
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  for (const Entry* entry : entries_) entry->look();
}

}  // namespace multiring
