#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/job_settings.h"
#include "transport/shared/group_layout.h"
#include "transport/shared/host_group.h"
#include "transport/transport.h"

namespace multiring {

struct SharedTransportOptions : JobSettings {
  explicit SharedTransportOptions(const JobSettings& settings = {}) : JobSettings(settings) {}

  /// See Transport::oversubscribed; by default the HostGroup decides.
  std::optional<bool> oversubscribed;
};

/// The transport of ranks that share memory, over any HostGroup.
///
/// A derived class may have remote members, whose parts of this host's memory it fills.
class MULTIRING_API SharedTransport : public Transport {
 public:
  /// Stands for a member that is not in the HostGroup.
  static constexpr int kRemote = -1;

  /// `members`: ranks of the group, or kRemote, in the order of their ranks here. Collective among them.
  SharedTransport(std::shared_ptr<HostGroup> host_group, std::vector<int> members, std::uint64_t tag,
                  const SharedTransportOptions& options, const WaitOptions& waiting);
  ~SharedTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string host(int rank) const override;
  std::int64_t process_id(int rank) const override;
  int world_rank(int rank) const override {
    return host_group_->world_rank(members_[static_cast<std::size_t>(rank)]);
  }
  int host_number(int) const override { return 0; }
  bool oversubscribed() const override { return oversubscribed_; }
  bool shares_memory() const override { return true; }

  std::byte* header(int rank, std::uint64_t round) const override;
  std::byte* staging(int rank, std::uint64_t round) const override;
  std::size_t staging_bytes() const override { return layout_.staging_bytes; }
  void arrive(std::uint64_t round, std::size_t staged) override;
  WaitResult await_all(std::uint64_t round, const WaitOptions& waiting) override;
  std::uint64_t arrived(int rank) const override;
  bool has_reached(int rank, std::uint64_t round) const override {
    return arrived(rank) >= round || state(rank).remote_arrival.load(std::memory_order_relaxed) >= round;
  }
  bool is_ahead(int rank) const override { return arrived(rank) > arrived(rank_); }
  Stragglers stragglers(std::uint64_t round) const override {
    Stragglers stragglers;
    for (int rank = 0; rank < size(); ++rank)
      if (!has_reached(rank, round)) stragglers.late.push_back(rank);
    return stragglers;
  }
  bool is_watched(int) const override { return true; }

  std::size_t mailbox_chunk_bytes() const override { return GroupLayout::kMailboxChunkBytes; }
  std::byte* mailbox_header(int source, int destination, std::uint64_t chunk) const override;
  std::byte* mailbox_payload(int source, int destination, std::uint64_t chunk) const override;
  void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) override;
  void mailbox_read(int source, std::uint64_t chunk) override;
  bool has_written(int source, std::uint64_t chunk) const override;
  WaitResult await_written(int source, std::uint64_t chunk, const WaitOptions& waiting) override;
  WaitResult await_any(AnySource& any, const WaitOptions& waiting) override;
  void wake_receives() override;
  WaitResult await_read(int destination, std::uint64_t chunk, const WaitOptions& waiting) override;
  WaitResult await_sent(int, const WaitOptions&) override { return {}; }

  /// Holds the headers, staging memory and mailboxes.
  std::shared_ptr<const void> memory() const { return block_; }

  std::shared_ptr<SymmetricRegion> allocate(std::size_t bytes_per_rank, std::uint32_t id,
                                            const WaitOptions& waiting) override;
  std::shared_ptr<Transport> subgroup(std::span<const int> members, std::uint64_t tag,
                                      const WaitOptions& waiting) override;

  void abort(const Error& error) noexcept override;
  bool aborted(AbortRecord* record) const override;
  WaitResult find_ended() const override;
  void leave() override;
  void abandon() override;
  void wake() override;

 protected:
  const std::shared_ptr<HostGroup>& host_group() const { return host_group_; }
  const std::vector<int>& members() const { return members_; }
  const SharedTransportOptions& options() const { return options_; }
  /// Ranks in the HostGroup of `members` of this transport.
  std::vector<int> group_members(std::span<const int> members) const;
  /// A tag that no other transport of the same ranks has.
  std::uint64_t subgroup_tag(std::uint64_t tag) const;

  /// The rank of this host that publishes the arrivals of `rank` here.
  virtual int receiver_of(int rank) const { return rank; }
  bool is_remote(int rank) const { return members_[static_cast<std::size_t>(rank)] == kRemote; }
  MailboxState& mailbox(int source, int destination) const;
  /// `rank` has reached `round`, and what it has published is in this host's memory.
  void publish_arrival(int rank, std::uint64_t round);
  /// `rank` has reached `round`, as other ranks report. What it has published is not here yet.
  void publish_remote_arrival(int rank, std::uint64_t round) {
    std::atomic<std::uint64_t>& reported = state(rank).remote_arrival;
    std::uint64_t known = reported.load(std::memory_order_relaxed);
    while (known < round && !reported.compare_exchange_weak(known, round, std::memory_order_relaxed)) {
    }
  }
  /// Ends the waits of this host's ranks. The first record wins.
  void publish_abort(ErrorKind kind, int origin, std::string_view message,
                     const ErrorContext& about) const noexcept;
  /// A member on this host that has ended before it reached `round`, preferably one that died.
  WaitResult find_lost(std::uint64_t round);
  /// The end of a source on this host, if that ends the wait; preferably of one that died.
  WaitResult find_lost_source(AnySource& any) const;

 private:
  RankState& state(int rank) const;
  void notify(WaitPoint& point) const;
  template <class Ready>
  WaitResult wait(WaitPoint& point, const Ready& ready, const WaitOptions& waiting);
  template <class Ready>
  WaitResult sleep(WaitPoint& point, const Ready& ready, const WaitOptions& waiting);
  template <class Ready>
  WaitResult check_for_end(const Ready& ready, const WaitOptions& waiting);
  template <class Ready>
  WaitResult find_lost_peer(const Ready& ready) const;
  /// kPeerLost if `rank`, on this host, has left or died.
  WaitResult end_of(int rank) const;
  /// The members on this host.
  std::vector<int> local_members() const;
  std::uint64_t block_tag(std::uint32_t number) const;
  /// For waits that are not on shared atomics: raises what ends those.
  void raise_if_aborted(const WaitOptions& waiting) const;

  std::shared_ptr<HostGroup> host_group_;
  std::vector<int> members_;
  int rank_ = 0;
  std::uint64_t tag_;
  SharedTransportOptions options_;
  bool oversubscribed_;
  GroupLayout layout_;
  std::shared_ptr<SharedBlock> block_;
  GroupControl* control_ = nullptr;
  std::atomic<bool> abandoned_{false};
  SpinBudget spin_;
};

}  // namespace multiring
