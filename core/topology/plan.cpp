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
Mode resolve(Mode mode, const Cluster& cluster, Order order) {
  if (mode.empty()) {
    mode = flat_mode(cluster);
    if (!cluster.fully_linked()) mode.back().algorithm = neighbour_algorithm(cluster, order);
  }
  require_fit(mode, cluster);
  for (Dimension& dimension : mode)
    if (!dimension.algorithm) dimension.algorithm = Algorithm::kPairwise;
  return mode;
}

void require_canonical(const Mode& mode) {
  for (const Dimension& dimension : mode) {
    if (!needs_any_order(dimension)) continue;
    const std::string name = traits_of(*dimension.algorithm).name;
    throw_usage("mode " + format_mode(mode) + ": a " + name + " of " + std::to_string(dimension.size) +
                " ranks adds in the order of the " + name +
                ", not in the canonical one; take the pairwise exchange (p), which sends the same bytes, or "
                "allow another order (MULTIRING_ORDER=any, --order any)");
  }
}

}  // namespace

void require_blocks(const Mode& mode) {
  const auto algorithm = [](const Dimension& dimension) {
    return dimension.algorithm.value_or(Algorithm::kPairwise);
  };
  const bool fits = mode.size() <= 2 && algorithm(mode.front()) == Algorithm::kPairwise &&
                    traits_of(algorithm(mode.back())).reducing_phase == Phase::kReduceScatter;
  if (!fits)
    throw_usage("mode " + format_mode(mode) +
                " is for allreduces: others cross hosts in one dimension, by one of " +
                algorithm_letters(Phase::kReduceScatter) + ", and use the pairwise exchange within hosts");
}

const char* phase_name(Phase phase) {
  static constexpr const char* kNames[] = {"reduce-scatter", "reduce", "allreduce", "broadcast",
                                           "all-gather"};
  return name_in(kNames, phase, "unknown");
}

namespace {
constexpr const char* kCollectiveNames[] = {"allreduce", "reduce_scatter", "allgather", "broadcast",
                                            "gather",    "scatter",        "alltoall"};
}

const char* collective_name(Collective collective) {
  return name_in(kCollectiveNames, collective, "unknown");
}

Collective parse_collective(std::string_view name) {
  if (const std::optional<Collective> found = find_collective(name)) return *found;
  std::string names;
  for (const Collective each : kAllCollectives)
    names += std::string(names.empty() ? "" : ", ") + collective_name(each);
  throw_usage("collective '" + std::string(name) +
              "' has no algorithms to choose from; these have: " + names);
}

std::optional<Collective> find_collective(std::string_view name) {
  for (const Collective each : kAllCollectives)
    if (name == collective_name(each)) return each;
  return std::nullopt;
}

PlanOptions collective_options(Collective collective, std::size_t count, int ranks) {
  PlanOptions options;
  options.collective = collective;
  options.count = count;
  const auto size = static_cast<std::size_t>(ranks);
  switch (collective) {
    case Collective::kAllreduce:
      break;
    case Collective::kAllgather:
    case Collective::kGather:
      options.blocks.assign(size, count);
      break;
    case Collective::kBroadcast:
      options.blocks.assign(size, 0);
      options.blocks.front() = count;
      break;
    case Collective::kReduceScatter:
    case Collective::kScatter:
    case Collective::kAlltoall:
      for (std::size_t rank = 0; rank < size; ++rank)
        options.blocks.push_back(block_range(count, size, rank).size());
  }
  return options;
}

std::size_t Step::most_parts() const {
  std::size_t most = 1;
  for (const Holding& holding : holdings) most = std::max(most, holding.parts);
  return most;
}

Plan::Plan(Cluster cluster, const PlanOptions& options) : cluster_(std::move(cluster)), options_(options) {
  cluster_.validate();
  if (!has_plans(options_.collective))
    throw_usage("there are no plans of " + std::string(collective_name(options_.collective)) +
                ": it crosses hosts in rounds, or by messages");
  mode_ = options_.mode = resolve(options.mode, cluster_, options.order);
  if (options_.collective != Collective::kAllreduce) {
    require_blocks(mode_);
    blocks_.emplace(cluster_, options_.blocks);
    options_.count = blocks_->count();
  }
  if (canonical() && adds(options_.collective)) require_canonical(mode_);
  channels_ = make_channels(cluster_, options_.channels);
  steps_ = PlanBuilder(*this).build();
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

std::vector<Range> Plan::host_shares(const Host& host) const {
  if (blocks_) return blocks_->shares(host);
  const Group group{host.ranks, {0, options_.count}, -1, 0};
  std::vector<Range> shares(host.ranks.size());
  if (traits_of(*mode_.front().algorithm).reducing_phase == Phase::kReduceScatter)
    for (std::size_t local_rank = 0; local_rank < shares.size(); ++local_rank)
      shares[local_rank] = share(group, local_rank);
  else
    shares.front() = group.range;
  return shares;
}

Range Plan::share(const Group& group, std::size_t position) const {
  if (group.owner >= 0) return static_cast<int>(position) == group.owner ? group.range : Range{};
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
