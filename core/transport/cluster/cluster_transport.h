#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/export.h"
#include "transport/cluster/cluster_hierarchy.h"
#include "transport/cluster/host_mirror.h"
#include "transport/cluster/progress_registry.h"
#include "transport/cluster/remote_messages.h"
#include "transport/network.h"
#include "transport/shared/shared_transport.h"

namespace multiring {

/// A rank of the world.
struct ClusterRank {
  int host = 0;   ///< number of its host
  int local = 0;  ///< its rank in the HostGroup of that host
  std::string host_name;
  std::int64_t process_id = 0;
};

/// The ranks of a host, in the order of their local ranks.
MULTIRING_API std::vector<int> ranks_of_host(const std::vector<ClusterRank>& ranks, int host);

/// Shared by all transports of a process.
struct ClusterContext {
  /// A network among `members` (world ranks, in the order of their ranks there), of which this process is the
  /// `rank`-th, unconnected. `name` is the same on all of them and never used twice. `in_store`: ranks find
  /// each other in the store, and otherwise learn their addresses.
  using MakeNetwork = std::function<std::unique_ptr<Network>(std::span<const int> members, int rank,
                                                             int channels, const std::string& name,
                                                             bool in_store, const WaitOptions& waiting)>;

  std::vector<ClusterRank> ranks;  ///< of the world
  int rank = 0;                    ///< of this process in the world
  std::shared_ptr<ProgressRegistry> progress = std::make_shared<ProgressRegistry>();
  std::shared_ptr<HostGroup> host_group;          ///< a PollingHostGroup
  int direct_hosts = MirrorRoutes::kDirectHosts;  ///< the same on all ranks
  HostLinks host_links = HostLinks::kSwitch;      ///< the same on all ranks
  MakeNetwork make_network;
};

/// The transport of ranks on several hosts. The memory that a host's ranks share has a part for every rank.
/// Between hosts there is one network, whose channels (channels.h) carry all that these ranks send.
///
/// What a rank publishes in a round goes to its receiver on each other host (`MirrorRoutes`), which writes it
/// into its host's memory and publishes the arrival. Mailboxes between hosts need no other rank.
class MULTIRING_API ClusterTransport final : public SharedTransport {
 public:
  /// `members`: world ranks in their order here. Collective among them. `options.oversubscribed` is set.
  /// `in_store`: the ranks have no group yet in which they could learn each other's addresses. To be
  /// connected.
  ClusterTransport(std::shared_ptr<const ClusterContext> context, std::vector<int> members, std::uint64_t tag,
                   bool in_store, const SharedTransportOptions& options, const WaitOptions& waiting);
  /// The world, connected. Collective.
  static std::shared_ptr<ClusterTransport> make_world(std::shared_ptr<const ClusterContext> context,
                                                      const SharedTransportOptions& options,
                                                      const WaitOptions& waiting);
  ~ClusterTransport() override;

  std::string host(int rank) const override;
  std::int64_t process_id(int rank) const override;
  int world_rank(int rank) const override { return world_[static_cast<std::size_t>(rank)]; }
  int host_number(int rank) const override { return info(rank).host; }
  bool shares_memory() const override { return false; }
  bool has_link(int rank, int other) const override;
  bool fully_linked() const override { return fully_linked_; }

  bool is_ahead(int rank) const override {
    return SharedTransport::is_ahead(rank) || (is_remote(rank) && mirror_->is_ahead(rank));
  }
  Stragglers stragglers(std::uint64_t round) const override;
  bool is_watched(int rank) const override;
  void arrive(std::uint64_t round, std::size_t staged) override;
  WaitResult await_all(std::uint64_t round, const WaitOptions& waiting) override;
  void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) override;
  void mailbox_read(int source, std::uint64_t chunk) override;
  WaitResult await_written(int source, std::uint64_t chunk, const WaitOptions& waiting) override;
  WaitResult await_any(AnySource& any, const WaitOptions& waiting) override;
  WaitResult await_read(int destination, std::uint64_t chunk, const WaitOptions& waiting) override;
  WaitResult await_sent(int destination, const WaitOptions& waiting) override;

  Hierarchy* hierarchy() override { return hierarchy_.get(); }
  std::shared_ptr<Transport> subgroup(std::span<const int> members, std::uint64_t tag,
                                      const WaitOptions& waiting) override;
  std::string addresses() const override { return network_->address(); }
  void learn_addresses(std::span<const std::string> by_rank) override;
  void connect_subgroup(Transport& subgroup, const WaitOptions& waiting) override;

  void abort(const Error& error) noexcept override;
  /// Also asks the network for errors of other hosts.
  bool aborted(AbortRecord* record) const override;
  WaitResult find_ended() const override;
  void leave() override;
  void abandon() override;
  void wake() override;

 protected:
  int receiver_of(int rank) const override { return receivers_[static_cast<std::size_t>(rank)]; }

 private:
  const ClusterRank& info(int rank) const {
    return context_->ranks[static_cast<std::size_t>(world_[static_cast<std::size_t>(rank)])];
  }
  void connect(const WaitOptions& waiting);
  /// Runs a step of making a subgroup, which ends with what ends the waits of this group.
  void while_watched(const WaitOptions& waiting, const std::function<void(const WaitOptions&)>& step);
  std::unique_ptr<Network> make_network(bool in_store, const WaitOptions& waiting) const;
  std::unique_ptr<ClusterHierarchy> make_hierarchy(const WaitOptions& waiting);
  std::unique_ptr<HostMirror> make_mirror();
  MirrorRoutes routes_of(int rank) const;
  void find_links();
  /// Routes of the ranks of this host, for errors. Any thread.
  const std::map<int, MirrorRoutes>& host_routes() const;
  void open_messages();
  /// Runs a wait on a network. An error on this host, or what `find_failure` finds, ends it, too.
  WaitResult wait_on_network(const WaitOptions& waiting,
                             const std::function<WaitResult(const WaitOptions&)>& wait,
                             const std::function<WaitResult()>& find_failure = nullptr);
  /// Runs a wait on this host's memory. An error on another host ends it, too.
  WaitResult wait_on_memory(const WaitOptions& waiting,
                            const std::function<WaitResult(const WaitOptions&)>& wait) const;
  /// Makes progress in all transports of this process, and propagates errors from and to other hosts.
  void poll() const;
  /// The same for this transport only.
  void poll_own() const;

  std::shared_ptr<const ClusterContext> context_;
  const std::uint64_t own_tag_;
  std::vector<int> world_;  // world ranks of the members
  std::vector<int> remote_;
  bool fully_linked_ = true;
  std::vector<int> receivers_;
  mutable std::once_flag routes_made_;
  mutable std::map<int, MirrorRoutes> routes_;  // see host_routes
  std::unique_ptr<Network> network_;
  std::unique_ptr<HostMirror> mirror_;
  std::unique_ptr<RemoteMessages> messages_;  // null before `connect`
  std::unique_ptr<ClusterHierarchy> hierarchy_;
  std::unique_ptr<ProgressRegistry::Entry> progress_entry_;
  mutable std::atomic<bool> relayed_{false};  // to other hosts: the error of a rank of this one
};

}  // namespace multiring
