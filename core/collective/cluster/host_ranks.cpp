#include "collective/cluster/host_ranks.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace multiring {

std::vector<std::vector<int>> ranks_by_host(const Transport& transport) {
  std::map<int, std::vector<int>> found;
  for (int rank = 0; rank < transport.size(); ++rank) found[transport.host_number(rank)].push_back(rank);
  std::vector<std::vector<int>> hosts;
  for (auto& [number, ranks] : found) hosts.push_back(std::move(ranks));
  return hosts;
}

bool all_hosts_linked(const Transport& transport) {
  if (transport.shares_memory() || !transport.fully_linked()) return false;
  int rank = 1;
  while (rank < transport.size() && transport.host_number(rank) == transport.host_number(0)) ++rank;
  return rank < transport.size();
}

HostRing::HostRing(const Transport& transport, int rank) : hosts_(ranks_by_host(transport)) {
  const auto own = std::ranges::find_if(
      hosts_, [&](const std::vector<int>& ranks) { return std::ranges::binary_search(ranks, rank); });
  std::ranges::rotate(hosts_, own);
  local_rank_ = static_cast<std::size_t>(std::ranges::find(hosts_[0], rank) - hosts_[0].begin());
}

std::vector<int> HostRing::paired(const std::vector<int>& host, std::size_t local_rank) const {
  std::vector<int> ranks;
  for (std::size_t at = local_rank; at < host.size(); at += own().size()) ranks.push_back(host[at]);
  return ranks;
}

std::vector<int> HostRing::peers() const {
  std::set<int> peers;
  for (std::size_t step = 1; step < size(); ++step) {
    peers.insert(counterpart(after(step)));
    for (const int rank : paired(after(step))) peers.insert(rank);
  }
  return {peers.begin(), peers.end()};
}

}  // namespace multiring
