#include "transport/cluster/mail_list.h"

#include <algorithm>

#include "base/deadline.h"

namespace multiring {
namespace {

// As often as waits look for interrupts.
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);

}  // namespace

MailList::Entry::Entry(std::shared_ptr<MailList> list, RemoteMail& mail)
    : list_(std::move(list)), mail_(mail) {
  const std::lock_guard lock(list_->mutex_);
  list_->mails_.push_back(&mail_);
}

MailList::Entry::~Entry() {
  const std::lock_guard lock(list_->mutex_);
  std::erase(list_->mails_, &mail_);
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
