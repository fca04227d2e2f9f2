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
#include "base/immovable.h"
#include "transport/shared/host_group.h"

namespace multiring {

/// The transports of a process. A rank that waits in one of them makes progress in all: it accepts the
/// connections of ranks that send to it in another, and propagates their errors.
class MULTIRING_API ProgressRegistry {
 public:
  /// `poll` is called as long as the entry exists. It must neither raise nor wait.
  class Entry : Immovable {
   public:
    Entry(std::shared_ptr<ProgressRegistry> registry, std::function<void()> poll);
    ~Entry();
    void poll() const { poll_(); }

   private:
    std::shared_ptr<ProgressRegistry> registry_;
    std::function<void()> poll_;
  };

  /// Polls all, unless that was just done or another thread is doing it.
  void poll();

 private:
  std::mutex mutex_;  // guards entries_; held while they are polled
  std::vector<const Entry*> entries_;
  std::atomic<std::int64_t> next_poll_{0};
};

/// A HostGroup whose sleeps make progress in all transports of the process.
class PollingHostGroup final : public HostGroup {
 public:
  /// `world`: the world ranks of the group.
  PollingHostGroup(std::shared_ptr<HostGroup> group, std::vector<int> world,
                   std::shared_ptr<ProgressRegistry> progress)
      : group_(std::move(group)), world_(std::move(world)), progress_(std::move(progress)) {}

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  std::string host() const override { return group_->host(); }
  std::int64_t process_id(int rank) const override { return group_->process_id(rank); }
  int world_rank(int rank) const override { return world_[static_cast<std::size_t>(rank)]; }
  std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members, std::uint64_t tag,
                                     const WaitOptions& waiting) override {
    return group_->share(bytes, members, tag, waiting);
  }
  bool is_lost(int rank) override { return group_->is_lost(rank); }
  void sleep(WaitPoint& point, std::uint32_t epoch, double seconds) override {
    progress_->poll();
    group_->sleep(point, epoch, seconds);
  }
  void wake(WaitPoint& point) override { group_->wake(point); }
  void abandon() override { group_->abandon(); }
  int cores() const override { return group_->cores(); }

 private:
  std::shared_ptr<HostGroup> group_;
  std::vector<int> world_;
  std::shared_ptr<ProgressRegistry> progress_;
};

}  // namespace multiring
