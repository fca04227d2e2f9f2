#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace multiring {

/// The ranks of each host in their order, the hosts by number: the same on all ranks.
std::vector<std::vector<int>> ranks_by_host(const Transport& transport);

/// Whether ranks are on several hosts, each of which has a link to each.
bool all_hosts_linked(const Transport& transport);

/// The hosts as one rank sees them: its own first, then those after it, around.
///
/// Ranks of two hosts are paired by their local ranks: each has one counterpart on the other host, its own
/// local rank modulo the number of ranks there.
class HostRing {
 public:
  HostRing(const Transport& transport, int rank);

  std::size_t size() const { return hosts_.size(); }
  std::span<const std::vector<int>> hosts() const { return hosts_; }
  const std::vector<int>& own() const { return hosts_[0]; }
  const std::vector<int>& after(std::size_t steps) const { return hosts_[steps]; }
  const std::vector<int>& before(std::size_t steps) const { return hosts_[(size() - steps) % size()]; }
  /// The rank's index among its host's ranks.
  std::size_t local_rank() const { return local_rank_; }
  /// The rank's counterpart on another host.
  int counterpart(const std::vector<int>& host) const { return host[local_rank_ % host.size()]; }
  /// The ranks of another host whose counterpart the rank is, or is the rank with another local rank.
  std::vector<int> paired(const std::vector<int>& host) const { return paired(host, local_rank_); }
  std::vector<int> paired(const std::vector<int>& host, std::size_t local_rank) const;
  /// All counterparts and all ranks that are paired with this one, ascending.
  std::vector<int> peers() const;

 private:
  std::vector<std::vector<int>> hosts_;
  std::size_t local_rank_ = 0;
};

}  // namespace multiring
