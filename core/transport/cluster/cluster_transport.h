#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
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

/// A rank of the world, as all ranks know it.
struct ClusterRank {
  int host = 0;   ///< number of its host
  int local = 0;  ///< its rank in the link of that host
  std::string host_name;
  std::int64_t process_id = 0;
};

/// The ranks of a host, in the order of their local ranks.
MULTIRING_API std::vector<int> ranks_of_host(const std::vector<ClusterRank>& ranks, int host);

/// What all transports of a process have in common.
struct ClusterContext {
  /// A network among `members` (ranks of the world, in the order of their ranks there), of which this one is
  /// the `rank`-th, unconnected; `name` is the same on all of them and never used twice.
  using MakeNetwork = std::function<std::unique_ptr<Network>(std::span<const int> members, int rank,
                                                             int channels, const std::string& name)>;

  std::vector<ClusterRank> ranks;  ///< of the world
  int rank = 0;                    ///< this one's in the world
  std::shared_ptr<MailList> mails = std::make_shared<MailList>();
  std::shared_ptr<HostLink> link;                 ///< to those of the same host; a MailHostLink
  int direct_hosts = MirrorRoutes::kDirectHosts;  ///< the same on all ranks
  MakeNetwork make_network;
};

/// The transport of ranks on several hosts: the ranks of a host share memory, in which the ranks of the other
/// hosts have their places, too.
///
/// What a rank publishes in a round goes to one rank of each other host, which *answers for it* there: it
/// receives it into its host's memory and says that it has come (`MirrorRoutes`). Mailboxes between hosts are
/// carried by the two ranks themselves.
class MULTIRING_API ClusterTransport final : public SharedTransport {
 public:
  /// `members`: ranks of the world in the order of their ranks here. Collective among them. `options.crowded`
  /// is set, the same on all.
  ClusterTransport(std::shared_ptr<const ClusterContext> context, std::vector<int> members, std::uint64_t tag,
                   const SharedTransportOptions& options, const Waiting& waiting);
  ~ClusterTransport() override;

  std::string host(int rank) const override;
  std::int64_t process_id(int rank) const override;
  int world_rank(int rank) const override { return world_[static_cast<std::size_t>(rank)]; }
  int host_number(int rank) const override { return place(rank).host; }
  bool shares_memory() const override { return false; }

  Missing missing(std::uint64_t round) const override;
  bool is_watched(int rank) const override;
  void arrive(std::uint64_t round, std::size_t staged) override;
  WaitResult await_all(std::uint64_t round, const Waiting& waiting) override;
  void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) override;
  void mailbox_read(int source, std::uint64_t chunk) override;
  WaitResult await_written(int source, std::uint64_t chunk, const Waiting& waiting) override;
  WaitResult await_read(int destination, std::uint64_t chunk, const Waiting& waiting) override;
  WaitResult await_sent(int destination, const Waiting& waiting) override;

  Hierarchy* hierarchy() override { return hierarchy_.get(); }
  std::shared_ptr<Transport> subgroup(std::span<const int> members, std::uint64_t tag,
                                      const Waiting& waiting) override;

  void abort(ErrorKind kind, const std::string& message) noexcept override;
  /// Looks what the other hosts have to tell, too, unless a wait does so already.
  bool aborted(AbortRecord* record) const override;
  void leave() override;
  void abandon() override;
  void wake() override;

 protected:
  int known_from(int rank) const override { return known_from_[static_cast<std::size_t>(rank)]; }

 private:
  const ClusterRank& place(int rank) const {
    return context_->ranks[static_cast<std::size_t>(world_[static_cast<std::size_t>(rank)])];
  }
  /// The start of the names of this transport's networks.
  std::string network_name() const;
  void connect(const Waiting& waiting);
  std::unique_ptr<Network> make_network(int channels, const std::string& purpose) const;
  std::unique_ptr<ClusterHierarchy> make_hierarchy(const Waiting& waiting);
  std::unique_ptr<HostMirror> make_mirror();
  MirrorRoutes routes_of(int rank) const;
  /// Of all ranks of this host, for errors. For the thread that drives the rounds.
  const std::map<int, MirrorRoutes>& host_routes() const;
  std::unique_ptr<RemoteMail> make_mail(std::unique_ptr<Network> network);
  /// A rank that is known to have ended; one that died rather than one that left.
  WaitResult find_ended() const;
  /// Runs a wait on a network that ends, too, when something on this host ends it.
  WaitResult watch(const Waiting& waiting, const std::function<WaitResult()>& trouble,
                   const std::function<WaitResult(const Waiting&)>& wait);
  /// Runs a wait on this host's memory that ends, too, when another host ends it.
  WaitResult listening(const Waiting& waiting, const std::function<WaitResult(const Waiting&)>& wait) const;
  /// What the other hosts have told of since, told to this one, and the other way; lets in who has mail.
  void hear() const;
  void hear_here() const;

  std::shared_ptr<const ClusterContext> context_;
  const std::uint64_t own_tag_;
  std::vector<int> world_;  // the members' ranks in the world
  std::vector<int> remote_;
  std::vector<int> known_from_;
  mutable std::map<int, MirrorRoutes> routes_;  // see host_routes
  std::unique_ptr<HostMirror> mirror_;
  std::unique_ptr<RemoteMail> mail_;
  std::unique_ptr<ClusterHierarchy> hierarchy_;
  std::unique_ptr<MailList::Entry> mail_entry_;
  mutable std::atomic<bool> relayed_{false};  // to other hosts: what a rank of this one has told of
};

}  // namespace multiring
