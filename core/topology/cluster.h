#pragma once

#include <span>
#include <vector>

#include "base/export.h"
#include "base/host_links.h"
#include "topology/canonical_tree.h"

namespace multiring {

/// A network interface of a host; full duplex.
struct Interface {
  double bytes_per_second = 0.0;  ///< in each direction
  double latency = 0.0;           ///< seconds from one host to another
};

/// The memory that the ranks of a host share.
struct HostMemory {
  double bytes_per_second = 20e9;  ///< reads and writes of all ranks together
  double latency = 1e-6;           ///< seconds of one synchronisation among the ranks
  /// What it costs more to write a byte that other cores have read since, in bytes read or written.
  double rewriting = 0.0;
};

struct Host {
  std::vector<int> ranks;  ///< ascending
  std::vector<Interface> interfaces;
  HostMemory memory;
};

/// Hosts and the ranks on them.
struct MULTIRING_API Cluster {
  std::vector<Host> hosts;
  HostLinks links = HostLinks::kSwitch;  ///< between hosts, by their index

  /// Number of ranks.
  int size() const;
  int host_count() const { return static_cast<int>(hosts.size()); }
  /// Whether each host has a link to each.
  bool fully_linked() const {
    return links == HostLinks::kSwitch || host_count() <= (links == HostLinks::kRing ? 3 : 2);
  }
  /// Whether all hosts have the same number of ranks.
  bool regular() const;
  /// The number of the host of each rank.
  std::vector<int> host_of_rank() const;

  /// The nodes of the canonical tree that the ranks of a host make up: one if its sum may travel as it is.
  std::vector<Subtree> parts_of_host(int host) const;
  /// Whether the ranks of every host are one node of the canonical tree.
  bool aligned() const;

  /// Raises a usage error unless every rank is on one host, ranks of hosts ascend, no host is empty, speeds
  /// are positive, and every host has an interface if there is more than one host.
  void validate() const;
};

/// How ranks are numbered over hosts.
enum class Placement {
  kBlocks,      ///< the first host has the first ranks
  kRoundRobin,  ///< one rank on each host in turn, as long as it has room
};

/// A cluster of hosts that differ only in their numbers of ranks. Raises a usage error where there is no
/// host, or one without ranks.
MULTIRING_API Cluster make_cluster(std::span<const int> ranks_per_host, std::vector<Interface> interfaces,
                                   HostMemory memory = {}, Placement placement = Placement::kBlocks);

/// A path through the network that all hosts use together: channel traffic leaves host h by interface
/// `interface % h.interfaces.size()`.
struct Channel {
  int interface = 0;
  double bytes_per_second = 0.0;  ///< of the slowest host, which every ring and exchange waits for
};

/// The channels that use all interfaces, at most `most` of them (the fastest), by number of the interface.
/// There are as many as the host with the most interfaces has; a host with fewer does not slow a channel for
/// which it has no interface of its own. Empty for a single host.
MULTIRING_API std::vector<Channel> make_channels(const Cluster& cluster, int most);

}  // namespace multiring
