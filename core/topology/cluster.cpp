#include "topology/cluster.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"

namespace multiring {
namespace {

std::string host_name(std::size_t host) { return "host " + std::to_string(host); }

bool is_speed(double value) { return std::isfinite(value) && value > 0.0; }

bool is_time(double value) { return std::isfinite(value) && value >= 0.0; }

void validate_links(const Host& host, std::size_t number, bool alone) {
  if (host.interfaces.empty() && !alone)
    throw_usage(host_name(number) + " has no interface to reach the others");
  for (const Interface& interface : host.interfaces)
    if (!is_speed(interface.bytes_per_second) || !is_time(interface.latency))
      throw_usage("an interface of " + host_name(number) +
                  " needs a speed above 0 and a latency of 0 or more");
  if (!is_speed(host.memory.bytes_per_second) || !is_time(host.memory.latency))
    throw_usage("the memory of " + host_name(number) + " needs a speed above 0 and a latency of 0 or more");
}

/// The ranks of each host, dealt one by one to the hosts that still have room.
std::vector<std::vector<int>> deal(std::span<const int> ranks_per_host, int size) {
  std::vector<std::vector<int>> ranks(ranks_per_host.size());
  for (int rank = 0; rank < size;)
    for (std::size_t host = 0; host < ranks.size(); ++host)
      if (static_cast<int>(ranks[host].size()) < ranks_per_host[host]) ranks[host].push_back(rank++);
  return ranks;
}

std::vector<std::vector<int>> fill(std::span<const int> ranks_per_host) {
  std::vector<std::vector<int>> ranks(ranks_per_host.size());
  int next = 0;
  for (std::size_t host = 0; host < ranks.size(); ++host)
    for (int local = 0; local < ranks_per_host[host]; ++local) ranks[host].push_back(next++);
  return ranks;
}

}  // namespace

int Cluster::size() const {
  std::size_t size = 0;
  for (const Host& host : hosts) size += host.ranks.size();
  return static_cast<int>(size);
}

bool Cluster::regular() const {
  return std::ranges::all_of(
      hosts, [&](const Host& host) { return host.ranks.size() == hosts.front().ranks.size(); });
}

std::vector<int> Cluster::host_of_rank() const {
  std::vector<int> host_of(static_cast<std::size_t>(size()));
  for (int host = 0; host < host_count(); ++host)
    for (const int rank : hosts[static_cast<std::size_t>(host)].ranks)
      host_of[static_cast<std::size_t>(rank)] = host;
  return host_of;
}

std::vector<Subtree> Cluster::parts_of_host(int host) const {
  return canonical_parts(hosts[static_cast<std::size_t>(host)].ranks, size());
}

bool Cluster::aligned() const {
  for (int host = 0; host < host_count(); ++host)
    if (parts_of_host(host).size() != 1) return false;
  return true;
}

void Cluster::validate() const {
  if (hosts.empty()) throw_usage("a cluster needs at least one host");
  const int ranks = size();
  std::vector<bool> seen(static_cast<std::size_t>(ranks), false);
  for (std::size_t number = 0; number < hosts.size(); ++number) {
    const Host& host = hosts[number];
    if (host.ranks.empty()) throw_usage(host_name(number) + " has no ranks");
    if (!std::ranges::is_sorted(host.ranks))
      throw_usage("the ranks of " + host_name(number) + " are not in order");
    for (const int rank : host.ranks) {
      if (rank < 0 || rank >= ranks)
        throw_usage("rank " + std::to_string(rank) + " on " + host_name(number) + " in a cluster of " +
                    std::to_string(ranks) + " ranks");
      if (seen[static_cast<std::size_t>(rank)])
        throw_usage("rank " + std::to_string(rank) + " is placed twice");
      seen[static_cast<std::size_t>(rank)] = true;
    }
    validate_links(host, number, hosts.size() == 1);
  }
}

Cluster make_cluster(std::span<const int> ranks_per_host, std::vector<Interface> interfaces,
                     HostMemory memory, Placement placement) {
  int size = 0;
  for (const int ranks : ranks_per_host) {
    if (ranks < 1) throw_usage("every host needs at least one rank, not " + std::to_string(ranks));
    if (ranks > std::numeric_limits<int>::max() - size) throw_usage("too many ranks");
    size += ranks;
  }
  Cluster cluster;
  auto ranks = placement == Placement::kBlocks ? fill(ranks_per_host) : deal(ranks_per_host, size);
  for (std::vector<int>& of_host : ranks) cluster.hosts.push_back({std::move(of_host), interfaces, memory});
  cluster.validate();
  return cluster;
}

std::vector<Channel> make_channels(const Cluster& cluster, int most) {
  std::vector<Channel> channels;
  if (cluster.host_count() < 2) return channels;
  for (const Host& host : cluster.hosts) {
    for (std::size_t index = 0; index < host.interfaces.size(); ++index) {
      const double speed = host.interfaces[index].bytes_per_second;
      if (index == channels.size()) channels.push_back({static_cast<int>(index), speed});
      channels[index].bytes_per_second = std::min(channels[index].bytes_per_second, speed);
    }
  }
  std::ranges::stable_sort(channels, std::ranges::greater{}, &Channel::bytes_per_second);
  channels.resize(std::min(channels.size(), static_cast<std::size_t>(std::max(most, 1))));
  std::ranges::sort(channels, std::ranges::less{}, &Channel::interface);
  return channels;
}

}  // namespace multiring
