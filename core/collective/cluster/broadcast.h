#pragma once

#include <cstddef>
#include <vector>

#include "collective/cluster/copy.h"
#include "collective/exchange.h"
#include "collective/operation.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Broadcast along a chain of hosts: one rank of each receives a segment from the host before, passes it on
/// to the next and shows it to its own, while the next segment is on its way. So every host sends and
/// receives the bytes once, whatever the number of hosts; in rounds the root's host sends them to each.
class ClusterBroadcast {
 public:
  ClusterBroadcast(Exchange& exchange, const Call& call, const Operation& operation);

  /// Whether the chain is worth its length: the same on all ranks.
  static bool pays(const Transport& transport, std::size_t bytes);
  void run();

 private:
  void pass_on();
  /// Brings a segment to all ranks of the host. `held`: the array of the rank that has it; null: of another.
  void show(std::size_t index, const std::byte* held);
  Range segment(std::size_t index) const {
    return segment_range(operation_.descriptor.bytes, segment_bytes_, index);
  }

  Exchange& exchange_;
  const Call& call_;
  const Operation& operation_;
  Hierarchy& hierarchy_;
  std::vector<int> chain_;  // the ranks that pass it on, the root first
  std::size_t link_ = 0;    // this host's place in the chain
  std::size_t segment_bytes_ = 0;
  std::size_t segments_ = 0;
};

}  // namespace multiring
