#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"
#include "transport/cluster/remote_mail.h"
#include "transport/shared/host_link.h"

namespace multiring {

/// The mail of all transports of a process. Whichever of them a rank waits in, it lets those in that want to
/// send to it in another.
class MULTIRING_API MailList {
 public:
  /// Mail that is looked at as long as this is there.
  class Entry {
   public:
    Entry(std::shared_ptr<MailList> list, RemoteMail& mail);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    std::shared_ptr<MailList> list_;
    RemoteMail& mail_;
  };

  /// Looks at all, unless another thread does so already.
  void look();
  /// The same, but not again and again. For waits that are short.
  void look_now_and_then();

 private:
  std::mutex mutex_;  // guards mails_; whoever looks has it
  std::vector<RemoteMail*> mails_;
  std::atomic<std::int64_t> next_look_{0};
};

/// A link to the ranks of a host whose sleeps look at the mail.
class MailHostLink final : public HostLink {
 public:
  MailHostLink(std::shared_ptr<HostLink> link, std::shared_ptr<MailList> mails)
      : link_(std::move(link)), mails_(std::move(mails)) {}

  int rank() const override { return link_->rank(); }
  int size() const override { return link_->size(); }
  std::string host() const override { return link_->host(); }
  std::int64_t process_id(int rank) const override { return link_->process_id(rank); }
  std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members, std::uint64_t tag,
                                     const Waiting& waiting) override {
    return link_->share(bytes, members, tag, waiting);
  }
  bool is_lost(int rank) override { return link_->is_lost(rank); }
  void sleep(WaitPoint& point, std::uint32_t epoch, double seconds) override {
    mails_->look_now_and_then();
    link_->sleep(point, epoch, seconds);
  }
  void wake(WaitPoint& point) override { link_->wake(point); }
  void abandon() override { link_->abandon(); }
  int cores() const override { return link_->cores(); }

 private:
  std::shared_ptr<HostLink> link_;
  std::shared_ptr<MailList> mails_;
};

}  // namespace multiring
