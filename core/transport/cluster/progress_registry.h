#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"
#include "transport/shared/host_group.h"

namespace multiring {

/// What all transports of a process look at. Whichever of them a rank waits in, it lets those in that want to
/// send to it in another, and passes on the errors that are told there.
class MULTIRING_API MailList {
 public:
  /// `look` is called as long as this is there; it raises nothing and never waits.
  class Entry {
   public:
    Entry(std::shared_ptr<MailList> list, std::function<void()> look);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    void look() const { look_(); }

   private:
    std::shared_ptr<MailList> list_;
    std::function<void()> look_;
  };

  /// Looks at all, unless that was just now, or another thread does so already.
  void look_now_and_then();

 private:
  std::mutex mutex_;  // guards entries_; whoever looks has it
  std::vector<const Entry*> entries_;
  std::atomic<std::int64_t> next_look_{0};
};

/// A link to the ranks of a host whose sleeps look at the mail.
class MailHostLink final : public HostLink {
 public:
  /// `world`: the ranks of this host as they are numbered in the world.
  MailHostLink(std::shared_ptr<HostLink> link, std::vector<int> world, std::shared_ptr<MailList> mails)
      : link_(std::move(link)), world_(std::move(world)), mails_(std::move(mails)) {}

  int rank() const override { return link_->rank(); }
  int size() const override { return link_->size(); }
  std::string host() const override { return link_->host(); }
  std::int64_t process_id(int rank) const override { return link_->process_id(rank); }
  int world_rank(int rank) const override { return world_[static_cast<std::size_t>(rank)]; }
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
  std::vector<int> world_;
  std::shared_ptr<MailList> mails_;
};

}  // namespace multiring
