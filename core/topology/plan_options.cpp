// The plans that are compared: all combinations of algorithms that the dimensions allow, with one interface
// and with all.

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "topology/cost_model.h"
#include "topology/transfers.h"

namespace multiring {
namespace {

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

/// The dimensions that are tried.
std::vector<Mode> modes_for(const Cluster& cluster, const PlanOptions& options, std::size_t segment_bytes,
                            const CostModel& model) {
  if (!options.mode.empty()) return {options.mode};
  std::vector<Mode> modes{flat_mode(cluster)};
  if (options.rounded || options.collective != Collective::kAllreduce) return modes;
  for (Mode& divided : divided_modes(cluster, segment_bytes, model)) modes.push_back(std::move(divided));
  return modes;
}

}  // namespace

std::vector<PlanOptions> plan_options(const Cluster& cluster, const PlanOptions& options,
                                      std::size_t segment_bytes, const CostModel& model) {
  cluster.validate();
  if (!options.mode.empty()) require_fit(options.mode, cluster);
  std::vector<int> channel_counts{1};
  const std::size_t all_channels = make_channels(cluster, options.channels).size();
  if (all_channels > 1) channel_counts.push_back(static_cast<int>(all_channels));
  std::vector<PlanOptions> found;
  for (const Mode& mode : modes_for(cluster, options, segment_bytes, model)) {
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

}  // namespace multiring
