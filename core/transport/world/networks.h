#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/cluster/cluster_transport.h"
#include "transport/world/connect_world.h"

namespace multiring {

/// What the ranks of the world have told each other, as far as networks need it.
struct MetRanks {
  std::vector<std::string> hosts;  ///< by world rank
  std::string job;                 ///< the same on all ranks
  bool local = false;              ///< all of them are on this host
};

/// What carries messages between hosts: a row of the table in networks.cpp.
struct NetworkKind {
  /// As in MULTIRING_TRANSPORT; ranks compare it.
  const char* name;
  bool (*is_chosen)(const WorldAddress& address);
  /// Raises a usage error if this rank cannot use it. Its functions may be called as long as the store lives.
  ClusterContext::MakeNetwork (*maker)(const std::shared_ptr<Store>& store, const WorldAddress& address,
                                       const MetRanks& ranks);
};

/// The kind that `address` asks for: the first that is chosen.
const NetworkKind& network_kind(const WorldAddress& address);

}  // namespace multiring
