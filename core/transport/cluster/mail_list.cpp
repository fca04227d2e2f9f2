#include "transport/cluster/mail_list.h"

#include <algorithm>

#include "base/deadline.h"

namespace multiring {
namespace {

// As often as waits look for interrupts.
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

}  // namespace

void MailList::add(RemoteMail& mail) {
  const std::lock_guard lock(mutex_);
  mails_.push_back(&mail);
}

void MailList::remove(RemoteMail& mail) {
  const std::lock_guard lock(mutex_);
  std::erase(mails_, &mail);
}

void MailList::look() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  for (RemoteMail* mail : mails_) mail->look();
}

void MailList::look_now_and_then() {
  const auto now = Clock::now().time_since_epoch();
  if (now.count() < next_look_.load(std::memory_order_relaxed)) return;
  next_look_.store((now + kBetweenLooks).count(), std::memory_order_relaxed);
  look();
}

}  // namespace multiring
