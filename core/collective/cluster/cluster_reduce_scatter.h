#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/cluster/cluster_copy.h"
#include "collective/cluster/host_ranks.h"
#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/sums/partial_sums.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Reduce-scatter by messages: for every rank of another host one rank adds what its own host contributes to
/// that rank's block, and sends it the sums, which are nodes of the canonical tree. A host sends what others
/// need once: half of what an allreduce sends.
///
/// In step (segment, i) the ranks of a host stage what they have for those of the i-th host after it, add it
/// and send it there; what the i-th before it sends arrives meanwhile. All ranks take the steps in the same
/// order, which avoids deadlocks.
class ClusterReduceScatter {
 public:
  /// `blocks`: ranges of bytes, for each rank the block it keeps. On two hosts at least.
  ClusterReduceScatter(Exchange& exchange, const OperationCall& call, const Operation& operation,
                       std::span<const Range> blocks);
  void run();

 private:
  using Part = PartialSums::Part;

  void divide();
  /// Allocates memory for what arrives until so many more messages have been posted.
  void reserve_parts(std::size_t ring_slots);
  void stage(std::size_t step);
  void post(MessageRing& ring, std::size_t step);
  /// Writes what this host contributes to a rank's segment, the sums one after the other. Returns their
  /// bytes.
  std::size_t add_host(int rank, std::size_t step, std::byte* to);
  void join(std::size_t segment);
  std::size_t bytes_of(const std::vector<Subtree>& nodes, std::size_t elements) const;
  std::byte* arrived(std::size_t segment, std::size_t distance) {
    return parts_.data() + ((segment % segments_in_flight_) * hosts_.size() + distance) * message_bytes_;
  }
  Range segment_of(int rank, std::size_t segment) const {
    return segment_range(blocks_[static_cast<std::size_t>(rank)].size(), segment_bytes_, segment);
  }
  std::size_t segment(std::size_t step) const { return step / hosts_.size(); }
  std::size_t distance(std::size_t step) const { return step % hosts_.size(); }

  Exchange& exchange_;
  const OperationCall& call_;
  const Operation& operation_;
  const std::span<const Range> blocks_;
  Hierarchy& hierarchy_;
  const HostRing hosts_;
  std::vector<std::vector<Subtree>> nodes_;  // what each host contributes, in the order of hosts_
  PartialSums sums_;
  const std::size_t element_;
  std::size_t segment_bytes_ = 0;  // of a block
  std::size_t segments_ = 0;
  std::size_t message_bytes_ = 0;  // at most
  std::size_t segments_in_flight_ = 0;
  std::vector<std::byte> parts_;
  std::vector<std::byte> sent_;
  std::vector<Part> inputs_;
};

}  // namespace multiring
