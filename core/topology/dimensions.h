#pragma once

#include <compare>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "topology/algorithms/algorithm.h"
#include "topology/cluster.h"

namespace multiring {

/// One level of the machine: within a host, across near hosts, across far hosts, ...
struct Dimension {
  int size = 1;
  std::optional<Algorithm> algorithm = std::nullopt;  ///< none: chosen by the cost model
  auto operator<=>(const Dimension&) const = default;
};

/// Dimensions from the inside out, written as `4x8x2`; a letter after a size forces the algorithm of that
/// dimension (`4x8r`, `4tx8d`).
using Mode = std::vector<Dimension>;

/// Reads a mode. Raises a usage error that shows the text and what is wrong with it.
MULTIRING_API Mode parse_mode(std::string_view text);
MULTIRING_API std::string format_mode(const Mode& mode);

/// Whether a dimension adds in another order than the canonical one; two ranks have no other.
MULTIRING_API bool needs_any_order(const Dimension& dimension);

/// Raises a usage error with the numbers unless `mode` fits: its first dimension is the number of ranks on
/// each host, or on the largest, the product of the others the number of hosts, and only the last dimension
/// uses an algorithm, such as recursive doubling, that leaves nothing to reduce in further ones.
MULTIRING_API void require_fit(const Mode& mode, const Cluster& cluster);

/// The dimensions of a cluster whose hosts are not divided into blocks: within hosts, of which the largest
/// counts, and across them if there are several.
MULTIRING_API Mode flat_mode(const Cluster& cluster);

}  // namespace multiring
