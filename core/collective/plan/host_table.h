#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "collective/plan/algorithm_row.h"
#include "collective/plan/crossing_algorithm.h"
#include "topology/cluster.h"

namespace multiring {

/// Buffers are looked for in symmetric memory from this size on.
inline constexpr std::size_t kMinSymmetricBytes = 512;

/// How the ranks of one host run an allreduce, by its bytes: rounds up to some, directly from some on where
/// arrays lie in symmetric memory, else staged.
struct HostChoice {
  std::size_t max_rounds = 0;
  std::size_t min_direct = 0;
  /// The same on all ranks, or they would read what others have not written.
  std::uint16_t hash() const;
};

/// The algorithms of an allreduce among ranks that share memory, each with its costs: what predicts, and what
/// chooses.
///
///   rounds   every rank stages everything, and adds everything: one synchronisation.
///   direct   each rank adds its slice of all arrays where they lie, and writes the sum to all: two.
///   staged   each rank adds its slice of each segment in staging memory: one for a segment, and one more.
class MULTIRING_API HostTable {
 public:
  /// `ranks`: at least 2. `rank_bytes_per_second`: that one of them reads and writes.
  HostTable(int ranks, HostMemory memory, double rank_bytes_per_second, std::size_t staging_bytes);

  /// The simplest first, with the chosen one; and direct, if it is quicker than that where it runs.
  std::vector<AlgorithmRow> rows(std::size_t bytes) const;
  HostChoice choice() const;

 private:
  using Kind = CrossingAlgorithm::Kind;

  AlgorithmRow row(Kind kind, std::size_t bytes) const;
  /// Whether the row of that name is a chosen one.
  bool chooses(Kind kind, std::size_t bytes) const;

  double ranks_;
  HostMemory memory_;
  double rank_bytes_per_second_;
  std::size_t staging_bytes_;
};

/// The same where one is forced: "rounds", "direct" (staged where arrays do not allow it) or "staged".
MULTIRING_API HostChoice forced_choice(CrossingAlgorithm::Kind kind);

}  // namespace multiring
