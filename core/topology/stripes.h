#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/export.h"
#include "topology/chunks.h"

namespace multiring {

/// `range` divided in proportion to `weights` (positive, at least one), in order. Every boundary is a
/// multiple of `granule` past `range.begin`, so no share is further from its due than one granule.
MULTIRING_API std::vector<Range> stripe_ranges(Range range, std::span<const double> weights,
                                               std::size_t granule);

}  // namespace multiring
