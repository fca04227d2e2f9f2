#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/cluster/cluster_copy.h"
#include "collective/cluster/host_ranks.h"
#include "collective/exchange.h"
#include "collective/staged/staged_copy.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Allgather by messages: every rank sends its piece to one rank of each other host, which shares it with its
/// local ranks, segment by segment, while the next segments are in flight. A host receives every piece once,
/// as it does through staging memory, but its links stay busy while its ranks copy.
///
/// In step (segment, i) a rank sends to the i-th host after its own, and receives from the i-th before; in
/// step (segment, 0) it shares its own. All ranks take the steps in the same order, which avoids deadlocks.
class ClusterAllgather {
 public:
  /// `own`: what this rank has; `incoming`: for each rank, where its piece goes.
  ClusterAllgather(Exchange& exchange, const OperationCall& call, StagedCopy::Outgoing own,
                   std::span<const StagedCopy::Incoming> incoming);

  /// Whether messages pay off where the longest piece has so many bytes. The same on all ranks.
  static bool is_worthwhile(const Transport& transport, std::size_t longest);
  /// `longest`: bytes of the longest piece, the same on all ranks.
  void run(std::size_t longest);

 private:
  void post(MessageRing& ring, std::size_t step);
  void share_within_host(std::size_t step);
  Range segment(std::size_t step, std::size_t bytes) const {
    return segment_range(bytes, segment_bytes_, step / hosts_.size());
  }
  std::size_t distance(std::size_t step) const { return step % hosts_.size(); }

  Exchange& exchange_;
  const OperationCall& call_;
  Hierarchy& hierarchy_;
  const HostRing hosts_;
  const StagedCopy::Outgoing own_;
  std::span<const StagedCopy::Incoming> incoming_;
  std::size_t section_bytes_ = 0;  // staging memory for each piece that a rank shares in a step
  std::size_t segment_bytes_ = 0;
};

}  // namespace multiring
