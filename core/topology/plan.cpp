#include "topology/plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/cache.h"
#include "base/error.h"
#include "base/names.h"
#include "topology/plan_builder.h"

namespace multiring {
namespace {

/// What passes between neighbours only.
Algorithm neighbour_algorithm(const Cluster& cluster, Order order) {
  return order == Order::kAny && cluster.links == HostLinks::kRing ? Algorithm::kRing : Algorithm::kChain;
}

/// Every dimension with its algorithm.
Mode resolve(Mode mode, const Cluster& cluster, const PlanOptions& options) {
  // Each dimension rounds, and bits are not to depend on how many there are.
  if (mode.empty()) {
    mode = options.rounded ? flat_mode(cluster) : automatic_mode(cluster);
    if (!cluster.fully_linked()) mode.back().algorithm = neighbour_algorithm(cluster, options.order);
  }
  require_fit(mode, cluster);
  for (Dimension& dimension : mode)
    if (!dimension.algorithm) dimension.algorithm = Algorithm::kPairwise;
  return mode;
}

void require_canonical(const Mode& mode) {
  for (const Dimension& dimension : mode)
    if (needs_any_order(dimension))
      throw Error(ErrorKind::kUsage,
                  "mode " + format_mode(mode) + ": a ring of " + std::to_string(dimension.size) +
                      " ranks adds in the order of the ring, not in the canonical one; take the pairwise "
                      "exchange (p), which sends the same bytes, or allow another order "
                      "(MULTIRING_ORDER=any, --order any)");
}

}  // namespace

Phase reducing_phase(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kPairwise:
    case Algorithm::kRing:
    case Algorithm::kChain:
      return Phase::kReduceScatter;
    case Algorithm::kDoubling:
      return Phase::kAllreduce;
    case Algorithm::kTree:
      break;
  }
  return Phase::kReduce;
}

const char* phase_name(Phase phase) {
  static constexpr const char* kNames[] = {"reduce-scatter", "reduce", "allreduce", "broadcast",
                                           "all-gather"};
  return name_in(kNames, phase, "unknown");
}

std::size_t Step::most_parts() const {
  std::size_t most = 1;
  for (const Holding& holding : holdings) most = std::max(most, holding.parts);
  return most;
}

Plan::Plan(Cluster cluster, const PlanOptions& options) : cluster_(std::move(cluster)), options_(options) {
  cluster_.validate();
  mode_ = options_.mode = resolve(options.mode, cluster_, options_);
  if (canonical()) require_canonical(mode_);
  channels_ = make_channels(cluster_, options_.channels);
  PlanBuilder builder(*this);
  steps_ = builder.build();
  largest_chunk_ = builder.largest_chunk();
}

std::size_t Plan::segments_of(std::size_t segment) const {
  if (segment == 0 || largest_chunk_ == 0) return 1;
  return segment_count(largest_chunk_, segment);
}

std::size_t Plan::partial_bytes() const {
  const bool half = options_.dtype == DType::kFloat16 || options_.dtype == DType::kBFloat16;
  return half && !options_.rounded ? dtype_size(DType::kFloat32) : element_bytes();
}

std::size_t Plan::granule() const { return kCacheLine / element_bytes(); }

Holding Plan::holding(std::vector<int> ranks) const {
  Holding holding;
  holding.ranks = std::move(ranks);
  if (!canonical()) {
    holding.bytes_per_element = holding.ranks.size() == 1 ? element_bytes() : partial_bytes();
    return holding;
  }
  const std::vector<Subtree> parts = canonical_parts(holding.ranks, cluster_.size());
  holding.parts = parts.size();
  for (const Subtree& part : parts)
    holding.bytes_per_element += part.size() == 1 ? element_bytes() : partial_bytes();
  return holding;
}

Range Plan::share(const Group& group, std::size_t position) const {
  const Range block = aligned_block_range(group.range.size(), group.ranks.size(), position, granule());
  return {group.range.begin + block.begin, group.range.begin + block.end};
}

std::size_t Plan::parts_across_hosts() const {
  std::size_t most = 1;
  for (const Step& step : steps_)
    if (step.across_hosts()) most = std::max(most, step.most_parts());
  return most;
}

}  // namespace multiring
