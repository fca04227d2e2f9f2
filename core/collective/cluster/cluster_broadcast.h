#pragma once

#include <cstddef>
#include <vector>

#include "collective/cluster/cluster_copy.h"
#include "collective/exchange.h"
#include "collective/operation.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Broadcast along a chain of hosts: one rank of each receives a segment from the host before, forwards it to
/// the next and shares it with its local ranks, while the next segment is in flight. Every host sends and
/// receives the bytes once; through staging memory the root's host sends them to each host.
class ClusterBroadcast {
 public:
  ClusterBroadcast(Exchange& exchange, const OperationCall& call, const Operation& operation);

  /// Whether the chain pays off. The same on all ranks.
  static bool is_worthwhile(const Transport& transport, std::size_t bytes);
  void run();

 private:
  void forward();
  /// Copies a segment to all ranks of the host. `held`: the array of the rank that has it; else null.
  void share_within_host(std::size_t index, const std::byte* held);
  Range segment(std::size_t index) const {
    return segment_range(operation_.descriptor.bytes, segment_bytes_, index);
  }

  Exchange& exchange_;
  const OperationCall& call_;
  const Operation& operation_;
  Hierarchy& hierarchy_;
  std::vector<int> chain_;       // the ranks that forward, the root first
  std::size_t chain_index_ = 0;  // this host's
  std::size_t segment_bytes_ = 0;
  std::size_t segments_ = 0;
};

}  // namespace multiring
