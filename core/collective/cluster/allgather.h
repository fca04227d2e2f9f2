#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/cluster/copy.h"
#include "collective/cluster/host_ranks.h"
#include "collective/exchange.h"
#include "collective/staged/copy.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Allgather by messages: every rank sends its piece to one rank of each other host, which shows it to the
/// others there, segment by segment, while the next are on their way. So a host receives the piece of every
/// rank once, as in rounds; but in rounds its links rest while its ranks copy.
///
/// In turn (segment, i) a rank sends to the i-th host after its own, and receives from the i-th before; in
/// turn (segment, 0) it shows its own. All ranks go through the turns in the same order, so of those that
/// wait for each other the one that is behind always finds what it needs posted.
class ClusterAllgather {
 public:
  /// `own`: what this rank has; `incoming`: for each rank, where its piece goes.
  ClusterAllgather(Exchange& exchange, const Call& call, StagedCopy::Outgoing own,
                   std::span<const StagedCopy::Incoming> incoming);

  /// Whether a longest piece of so many bytes is worth it: the same on all ranks.
  static bool pays(const Transport& transport, std::size_t longest);
  /// `longest`: bytes of the longest piece, the same on all ranks.
  void run(std::size_t longest);

 private:
  void post(MessageRing& ring, std::size_t turn);
  void show(std::size_t turn);
  Range segment(std::size_t turn, std::size_t bytes) const {
    return segment_range(bytes, segment_bytes_, turn / hosts_.size());
  }
  std::size_t step(std::size_t turn) const { return turn % hosts_.size(); }

  Exchange& exchange_;
  const Call& call_;
  Hierarchy& hierarchy_;
  const HostRing hosts_;
  const StagedCopy::Outgoing own_;
  std::span<const StagedCopy::Incoming> incoming_;
  std::size_t lane_bytes_ = 0;  // staging memory for one piece of several that a rank shows at once
  std::size_t segment_bytes_ = 0;
};

}  // namespace multiring
