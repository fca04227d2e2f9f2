// The choice among plans: all combinations of algorithms that the dimensions allow, with one interface and
// with all, each with its best segment.

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "base/error.h"
#include "topology/cost_model.h"
#include "topology/transfers.h"

namespace multiring {
namespace {

// Below this a message costs more than what it carries, and above the caches hold it no longer.
constexpr std::size_t kMinSegmentBytes = 4 * 1024;
constexpr std::size_t kMaxSegmentBytes = 16 * 1024 * 1024;

/// The algorithms that are tried where none is forced, the simplest first.
std::vector<Algorithm> candidates_for(bool across_hosts, bool last, const PlanOptions& options,
                                      bool fully_linked) {
  const bool has_blocks = options.collective != Collective::kAllreduce;
  const auto is_compared = [&](Algorithm algorithm) {
    const AlgorithmTraits& traits = traits_of(algorithm);
    if (has_blocks && !across_hosts) return algorithm == Algorithm::kPairwise;
    if (has_blocks && traits.reducing_phase != Phase::kReduceScatter) return false;
    if (!last && traits.reducing_phase == Phase::kAllreduce) return false;
    if (options.order != Order::kAny && traits.by_chunk == ByChunk::kOrder) return false;
    // What one rank has passes along a line as quickly as round a ring in two halves, in half of the
    // messages.
    const bool is_line = !fully_linked || options.collective == Collective::kBroadcast;
    if (traits.candidate == Candidate::kAmongNeighbours) return across_hosts && is_line;
    return across_hosts || traits.candidate == Candidate::kEverywhere;
  };
  std::vector<Algorithm> found;
  std::ranges::copy_if(kAllAlgorithms, std::back_inserter(found), is_compared);
  std::ranges::stable_sort(found, {}, [](Algorithm algorithm) { return traits_of(algorithm).complexity; });
  return found;
}

/// The ways that are tried to give each dimension an algorithm. Dimensions between the first and the last get
/// the same: they are alike, and combinations of many dimensions have no end.
std::vector<Mode> combinations(const Mode& mode, const PlanOptions& options, bool linked) {
  std::vector<Mode> modes;
  for (const Algorithm first : candidates_for(false, mode.size() == 1, options, linked)) {
    for (const Algorithm between : candidates_for(true, false, options, linked)) {
      for (const Algorithm last : candidates_for(true, true, options, linked)) {
        Mode tried = mode;
        for (std::size_t index = 0; index < mode.size(); ++index) {
          const Algorithm wanted = index == 0 ? first : index + 1 == mode.size() ? last : between;
          if (!mode[index].algorithm)
            tried[index].algorithm = mode[index].size > 1 ? wanted : Algorithm::kPairwise;
        }
        if (std::ranges::find(modes, tried) == modes.end()) modes.push_back(std::move(tried));
      }
    }
  }
  return modes;
}

/// Elements of the segments that are tried for a plan; 0 stands for whole chunks.
std::vector<std::size_t> segments(const Plan& plan) {
  if (plan.segment() != 0) return {plan.segment()};
  std::vector<std::size_t> found{0};
  for (std::size_t bytes = kMaxSegmentBytes; bytes >= kMinSegmentBytes; bytes /= 2)
    if (bytes < plan.largest_chunk() * plan.element_bytes()) found.push_back(bytes / plan.element_bytes());
  return found;
}

/// The dimensions that are tried.
std::vector<Mode> modes_for(const Cluster& cluster, const PlanOptions& options) {
  if (!options.mode.empty()) return {options.mode};
  std::vector<Mode> modes{flat_mode(cluster)};
  if (options.rounded || options.collective != Collective::kAllreduce) return modes;
  if (const Mode divided = automatic_mode(cluster); divided != modes[0]) modes.push_back(divided);
  return modes;
}

[[noreturn]] void throw_unlinked(const Cluster& cluster, const PlanOptions& options) {
  const auto [from, to] = missing_link(cluster, options).value();
  throw_usage(
      "mode " + format_mode(options.mode) + " sends from host " + std::to_string(from) + " to host " +
      std::to_string(to) +
      ", which have no link; hosts that reach their neighbours only take one dimension, by a chain (c), "
      "or in any order a ring (r)");
}

}  // namespace

std::vector<PlanOptions> plan_options(const Cluster& cluster, const PlanOptions& options) {
  cluster.validate();
  if (!options.mode.empty()) require_fit(options.mode, cluster);
  std::vector<int> channel_counts{1};
  const std::size_t all_channels = make_channels(cluster, options.channels).size();
  if (all_channels > 1) channel_counts.push_back(static_cast<int>(all_channels));
  std::vector<PlanOptions> found;
  for (const Mode& mode : modes_for(cluster, options)) {
    for (const Mode& combination : combinations(mode, options, cluster.fully_linked())) {
      PlanOptions tried = options;
      tried.mode = combination;
      if (missing_link(cluster, tried)) continue;
      for (const int channels : channel_counts) {
        tried.channels = channels;
        found.push_back(tried);
      }
    }
  }
  return found;
}

Plan choose_plan(const Cluster& cluster, const PlanOptions& options, const CostModel& model) {
  std::vector<PlanOptions> tried;
  std::vector<double> seconds;
  for (PlanOptions& one : plan_options(cluster, options)) {
    const Plan plan(cluster, one);
    const PlanCost cost = predict_steps(plan, model);
    for (const std::size_t segment : segments(plan)) {
      one.segment = segment;
      tried.push_back(one);
      seconds.push_back(cost.seconds(plan.segments_of(segment)));
    }
  }
  if (tried.empty()) throw_unlinked(cluster, options);
  const double least = *std::ranges::min_element(seconds);
  const auto found = std::ranges::find_if(seconds, [&](double each) { return each <= least * kAsGood; });
  return {cluster, tried[static_cast<std::size_t>(found - seconds.begin())]};
}

}  // namespace multiring
