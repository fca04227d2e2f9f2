#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "topology/plan.h"

namespace multiring::testing {

using Mask = std::uint64_t;

/// Each node of the canonical tree of `size` ranks, as a mask of its ranks, with its children; after
/// base/arithmetic/reduction.h. Those of one rank, which have none, are not among them.
std::map<Mask, std::pair<Mask, Mask>> canonical_nodes(int size);

/// Executes every transfer of a plan on one value per rank and range of elements, and keeps track of what has
/// been added to what. Returns what went wrong, or nothing:
///   - a rank sends what it does not have, or gets what it has already;
///   - sums are joined otherwise than in the canonical tree (plans in canonical order), or a contribution
///   twice;
///   - a transfer's bytes are not those of what it carries;
///   - a rank ends without the whole sum, or with other bits than base/arithmetic/reduction.h gives.
/// At most 64 ranks.
std::string simulate(const Plan& plan);

/// Clusters to try plans on: hosts x ranks, hosts that differ, and ranks dealt to hosts in turn.
std::vector<Cluster> clusters_to_try();

/// One line that names a cluster in a failure.
std::string describe(const Cluster& cluster);

}  // namespace multiring::testing
