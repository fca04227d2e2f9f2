#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/shared/group_layout.h"
#include "transport/shared/host_group.h"
#include "transport/transport.h"

namespace multiring {

struct SharedTransportOptions {
  std::size_t staging_bytes = 256 * 1024;
  /// Microseconds a wait may spin before it sleeps, or yield its core where ranks outnumber cores; negative:
  /// the default.
  double spin_microseconds = -1.0;
  /// See Transport::crowded; by default what the link tells.
  std::optional<bool> crowded;
};

/// The transport of ranks that share memory, over any HostLink.
///
/// A derived class may have members elsewhere: they have their places in this host's memory, too, and the
/// class fills those.
class MULTIRING_API SharedTransport : public Transport {
 public:
  /// In place of a member that the link does not reach.
  static constexpr int kElsewhere = -1;

  /// `members`: ranks of the link's world in the order of their ranks here. Collective among them.
  SharedTransport(std::shared_ptr<HostLink> link, std::vector<int> members, std::uint64_t tag,
                  const SharedTransportOptions& options, const Waiting& waiting);
  ~SharedTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string host(int rank) const override;
  std::int64_t process_id(int rank) const override;
  int world_rank(int rank) const override {
    return link_->world_rank(members_[static_cast<std::size_t>(rank)]);
  }
  int host_number(int) const override { return 0; }
  bool crowded() const override { return crowded_; }
  bool shares_memory() const override { return true; }

  std::byte* header(int rank, std::uint64_t round) const override;
  std::byte* staging(int rank, std::uint64_t round) const override;
  std::size_t staging_bytes() const override { return layout_.staging_bytes; }
  void arrive(std::uint64_t round, std::size_t staged) override;
  WaitResult await_all(std::uint64_t round, const Waiting& waiting) override;
  std::uint64_t arrived(int rank) const override;
  bool has_come(int rank, std::uint64_t round) const override {
    return arrived(rank) >= round || state(rank).heard.load(std::memory_order_relaxed) >= round;
  }
  Missing missing(std::uint64_t round) const override {
    Missing missing;
    for (int rank = 0; rank < size(); ++rank)
      if (!has_come(rank, round)) missing.late.push_back(rank);
    return missing;
  }
  bool is_watched(int) const override { return true; }

  std::size_t mailbox_chunk_bytes() const override { return GroupLayout::kMailboxChunkBytes; }
  std::byte* mailbox_header(int source, int destination, std::uint64_t chunk) const override;
  std::byte* mailbox_payload(int source, int destination, std::uint64_t chunk) const override;
  void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) override;
  void mailbox_read(int source, std::uint64_t chunk) override;
  bool has_written(int source, std::uint64_t chunk) const override;
  WaitResult await_written(int source, std::uint64_t chunk, const Waiting& waiting) override;
  WaitResult await_read(int destination, std::uint64_t chunk, const Waiting& waiting) override;
  WaitResult await_sent(int, const Waiting&) override { return {}; }

  /// What the headers, staging memory and mailboxes lie in.
  std::shared_ptr<const void> memory() const { return block_; }

  std::shared_ptr<SymmetricRegion> allocate(std::size_t bytes_per_rank, std::uint32_t id,
                                            const Waiting& waiting) override;
  std::shared_ptr<Transport> subgroup(std::span<const int> members, std::uint64_t tag,
                                      const Waiting& waiting) override;

  void abort(ErrorKind kind, const std::string& message) noexcept override;
  bool aborted(AbortRecord* record) const override;
  void leave() override;
  void abandon() override;
  void wake() override;

 protected:
  const std::shared_ptr<HostLink>& link() const { return link_; }
  const std::vector<int>& members() const { return members_; }
  const SharedTransportOptions& options() const { return options_; }
  /// World ranks of `members` of this transport.
  std::vector<int> world_ranks(std::span<const int> members) const;
  /// A tag that no other transport of the same ranks has.
  std::uint64_t subgroup_tag(std::uint64_t tag) const;

  /// Who tells this rank of the arrivals of `rank`: while that one is late, nothing is known of the other.
  virtual int known_from(int rank) const { return rank; }
  bool is_elsewhere(int rank) const { return members_[static_cast<std::size_t>(rank)] == kElsewhere; }
  MailboxState& mailbox(int source, int destination) const;
  /// `rank` has come to `round`, and what it has published lies in this host's memory.
  void publish_arrival(int rank, std::uint64_t round);
  /// `rank` has come to `round`, as others tell; what it has published is not here yet.
  void publish_hearsay(int rank, std::uint64_t round) {
    std::atomic<std::uint64_t>& heard = state(rank).heard;
    std::uint64_t known = heard.load(std::memory_order_relaxed);
    while (known < round && !heard.compare_exchange_weak(known, round, std::memory_order_relaxed)) {
    }
  }
  /// The waits of this host's ranks end. The first record wins.
  void publish_abort(ErrorKind kind, int origin, const std::string& message) const noexcept;
  /// A member on this host that has ended without coming to `round`, one that died rather than one that left;
  /// an arrival where there is none.
  WaitResult find_lost(std::uint64_t round);
  /// A member on this host that has ended; one that died rather than one that left.
  WaitResult find_ended_here() const;

 private:
  RankState& state(int rank) const;
  void notify(WaitPoint& point) const;
  template <class Ready>
  WaitResult wait(WaitPoint& point, const Ready& ready, const Waiting& waiting);
  template <class Ready>
  WaitResult sleep(WaitPoint& point, const Ready& ready, const Waiting& waiting);
  template <class Ready>
  WaitResult look_for_trouble(const Ready& ready, const Waiting& waiting);
  template <class Ready>
  WaitResult find_lost_peer(const Ready& ready) const;
  /// The members that the link reaches.
  std::vector<int> here() const;
  /// For waits that are not on shared atomics: raises what would end one of those.
  void look_for_abort(const Waiting& waiting) const;

  std::shared_ptr<HostLink> link_;
  std::vector<int> members_;
  int rank_ = 0;
  std::uint64_t tag_;
  SharedTransportOptions options_;
  bool crowded_;
  GroupLayout layout_;
  std::shared_ptr<SharedBlock> block_;
  GroupControl* control_ = nullptr;
  std::atomic<bool> abandoned_{false};
  SpinBudget spin_;
};

}  // namespace multiring
