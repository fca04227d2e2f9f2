#pragma once

#include <compare>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "topology/cluster.h"

namespace multiring {

/// How a group of ranks reduces in one dimension.
enum class Algorithm {
  /// Each owner of a chunk receives what all others have summed of it and adds that in canonical order; then
  /// each owner sends its chunk to all. The bytes of a ring in one step instead of n - 1.
  kPairwise,
  /// Reduce-scatter and all-gather around a ring. Adds in the order of the ring, which differs by chunk.
  kRing,
  /// Recursive doubling: partners at distance 1, 2, 4, ... exchange all they have.
  kDoubling,
  /// A binomial tree to the first rank of the group and back; in a host the first rank reads all others.
  kTree,
  /// Each chunk's contributions pass along the line of ranks to its owner, from both ends, and its sum back.
  /// Neighbours only, in canonical order: some links carry several sums of an element (ADR 27).
  kChain,
};

inline constexpr Algorithm kAllAlgorithms[] = {Algorithm::kPairwise, Algorithm::kRing, Algorithm::kDoubling,
                                               Algorithm::kTree, Algorithm::kChain};

/// One level of the machine: within a host, across near hosts, across far hosts, ...
struct Dimension {
  int size = 1;
  std::optional<Algorithm> algorithm = std::nullopt;  ///< none: chosen by the cost model
  auto operator<=>(const Dimension&) const = default;
};

/// Dimensions from the inside out, written as `4x8x2`; a letter after a size forces the algorithm of that
/// dimension (`4x8r`, `4tx8d`).
using Mode = std::vector<Dimension>;

MULTIRING_API char algorithm_letter(Algorithm algorithm);
/// "pairwise exchange".
MULTIRING_API const char* algorithm_name(Algorithm algorithm);
/// "p pairwise exchange, r ring, ...", for messages.
MULTIRING_API std::string algorithm_letters();

/// Reads a mode. Raises a usage error that shows the text and what is wrong with it.
MULTIRING_API Mode parse_mode(std::string_view text);
MULTIRING_API std::string format_mode(const Mode& mode);

/// Whether a dimension adds in another order than the canonical one.
constexpr bool needs_any_order(const Dimension& dimension) {
  return dimension.algorithm == Algorithm::kRing && dimension.size > 2;
}

/// Raises a usage error with the numbers unless `mode` fits: its product is the number of ranks, its first
/// dimension that of ranks on each host, and only the last dimension uses recursive doubling, which leaves
/// nothing to divide among further ones. Where hosts have different numbers of ranks, the sizes are those of
/// flat_mode() or automatic_mode().
MULTIRING_API void require_fit(const Mode& mode, const Cluster& cluster);

/// The dimensions of a cluster without a forced mode: within hosts, and across hosts if there are several, of
/// which many are divided (64 hosts: 8x8) where that sends about the same bytes in fewer messages. The size
/// within hosts is that of the largest. Hosts that reach their neighbours only are one dimension.
MULTIRING_API Mode automatic_mode(const Cluster& cluster);

/// The same with one dimension across hosts.
MULTIRING_API Mode flat_mode(const Cluster& cluster);

}  // namespace multiring
