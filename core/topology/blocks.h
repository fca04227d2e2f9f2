#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/export.h"
#include "topology/chunks.h"
#include "topology/cluster.h"

namespace multiring {

/// The blocks of a reduce-scatter or an allgather, one of each rank, as elements of a plan: on every host one
/// rank carries a block, that is, adds it or passes it on.
///
/// There are as many columns as the largest host has ranks, and the ranks of each host are spread over them.
/// Blocks of one column lie next to each other, so that what a rank carries is one range.
class MULTIRING_API Blocks {
 public:
  /// `sizes`: elements of each rank's block.
  Blocks(const Cluster& cluster, std::span<const std::size_t> sizes);

  /// Ranks in the order in which their blocks lie.
  static std::vector<int> order(const Cluster& cluster);

  std::size_t count() const { return column_begins_.back(); }
  Range of(int rank) const { return ranges_[static_cast<std::size_t>(rank)]; }
  /// What each rank of a host carries.
  std::vector<Range> shares(const Host& host) const;
  /// The rank of a host that carries the block of `rank`: on its own host, the rank itself.
  int carrier(const Host& host, int rank) const;

 private:
  std::size_t columns() const { return column_begins_.size() - 1; }

  std::vector<Range> ranges_;               // by rank
  std::vector<std::size_t> column_of_;      // by rank
  std::vector<std::size_t> column_begins_;  // and the end of the last
};

}  // namespace multiring
