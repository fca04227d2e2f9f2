#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/arithmetic/order.h"
#include "base/export.h"
#include "base/nccl_scope.h"
#include "collective/plan/algorithm_row.h"
#include "collective/plan/crossing_algorithm.h"
#include "topology/cluster.h"

namespace multiring {

/// Buffers are looked for in symmetric memory from this size on.
inline constexpr std::size_t kMinSymmetricBytes = 512;

/// How the ranks of one host run an allreduce or a reduce-scatter, by its bytes: rounds up to some, directly
/// from some on where arrays lie in symmetric memory, else staged.
struct HostChoice {
  std::size_t max_rounds = 0;
  std::size_t min_direct = 0;
  /// The same on all ranks, or they would read what others have not written.
  std::uint16_t hash() const;
};

/// The algorithms of an allreduce or a reduce-scatter among ranks that share memory, each with its costs:
/// what predicts, and what chooses.
///
///   rounds   every rank stages everything, and adds everything: one synchronisation. Of allreduces.
///   direct   each rank adds its slice of all arrays where they lie, and writes the sum to all (of a
///            reduce-scatter: its block, to its output): two.
///   staged   each rank adds its slice of each segment in staging memory: one for a segment, and one more (of
///            a reduce-scatter, whose sums go nowhere: no more).
class MULTIRING_API HostTable {
 public:
  /// `ranks`: at least 2, each of which reaches half of what `memory` can do. Raises a usage error for
  /// another collective.
  HostTable(Collective collective, int ranks, HostMemory memory, std::size_t staging_bytes);

  /// All of them, with those that `choice` takes: two, where arrays in symmetric memory take another one. In
  /// any order NCCL's is one more, unless it is off, else peer memory's, without costs: nothing has measured
  /// these.
  std::vector<AlgorithmRow> rows(std::size_t bytes, const HostChoice& choice, Order order = Order::kCanonical,
                                 NcclScope nccl = NcclScope::kHost) const;
  /// The quickest.
  HostChoice choice() const;

 private:
  using Kind = CrossingAlgorithm::Kind;

  AlgorithmRow row(Kind kind, std::size_t bytes) const;
  /// Whether it is the simplest of those that are as good as the quickest of `kinds`.
  bool is_quickest(Kind kind, std::span<const Kind> kinds, std::size_t bytes) const;

  Collective collective_;
  double ranks_;
  HostMemory memory_;
  std::size_t staging_bytes_;
};

/// The same where one is forced: "rounds", "direct" (staged where arrays do not allow it) or "staged".
MULTIRING_API HostChoice forced_choice(CrossingAlgorithm::Kind kind);

}  // namespace multiring
