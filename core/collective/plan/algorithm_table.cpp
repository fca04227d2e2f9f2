#include "collective/plan/algorithm_table.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/cache.h"
#include "base/error.h"
#include "collective/staged/sections.h"
#include "topology/chunks.h"
#include "topology/traffic.h"
#include "topology/transfers.h"
#include "transport/hierarchy.h"

namespace multiring {
namespace {

// Segments that are tried for a broadcast. More than so many for each host do not make it quicker (measured
// on 4 x 2 emulated hosts): what a rank does for each is not all in the model.
constexpr std::size_t kMinBroadcastSegment = 16 * 1024;
constexpr std::size_t kMaxBroadcastSegment = 512 * 1024;
constexpr std::size_t kBroadcastSegmentsOfHost = 8;

Cluster validated(Cluster cluster) {
  cluster.validate();
  if (cluster.host_count() == 1) throw_usage("algorithms across hosts need several hosts");
  return cluster;
}

std::size_t usable(std::size_t staging_bytes) {
  if (staging_bytes < kCacheLine) throw_usage("rounds need staging memory of a cache line");
  return staging_bytes / kCacheLine * kCacheLine;
}

/// Bytes of an element in arrays. Only float32 is rounded, and not in rounds.
std::size_t element_bytes(const PlanOptions& options) {
  return options.rounded ? sizeof(float) : dtype_size(options.dtype);
}

PlanOptions as_allreduce(PlanOptions options) {
  options.count = std::accumulate(options.blocks.begin(), options.blocks.end(), std::size_t{0});
  options.blocks.clear();
  options.collective = Collective::kAllreduce;
  return options;
}

/// Rings always run where nothing is added.
PlanOptions in_its_order(PlanOptions options) {
  if (!adds(options.collective)) options.order = Order::kAny;
  return options;
}

/// The first of those that are as good as the quickest.
template <class Entries>
auto& simplest_quick(Entries& entries) {
  double least = entries.front().seconds;
  for (const auto& entry : entries) least = std::min(least, entry.seconds);
  return *std::ranges::find_if(entries, [&](const auto& entry) { return entry.seconds <= least * kAsGood; });
}

}  // namespace

AlgorithmTable::AlgorithmTable(Cluster cluster, CostModel model, std::size_t staging_bytes)
    : cluster_(validated(std::move(cluster))),
      model_(std::move(model)),
      staging_bytes_(usable(staging_bytes)),
      round_(cluster_) {}

/// 0: staging memory is too small for so many blocks.
std::size_t AlgorithmTable::segments_of(const PlanOptions& options, std::size_t segment) const {
  const std::size_t element = element_bytes(options);
  const std::size_t staging = hierarchy_staging_bytes(staging_bytes_);
  if (options.blocks.empty()) {
    const std::size_t bytes = options.count * element;
    return bytes == 0 ? 1 : segment_count(bytes, plan_segment_bytes(bytes, staging, segment));
  }
  std::vector<std::size_t> blocks = options.blocks;
  for (std::size_t& block : blocks) block *= element;
  if (*std::ranges::max_element(blocks) == 0) return 1;
  return block_segments(blocks, staging, segment).size();
}

AlgorithmTable::Load AlgorithmTable::load_of(const CrossingAlgorithm& algorithm, std::size_t bytes) const {
  PlanOptions options;
  options.count = bytes / sizeof(float);
  if (algorithm.staged) return round_load(options);
  options.mode = algorithm.mode;
  if (std::ranges::any_of(algorithm.mode, needs_any_order)) options.order = Order::kAny;
  Load load;
  load.plan = multiring::load_of(Plan(cluster_, options));
  load.segments = segments_of(options, algorithm.segment);
  return load;
}

AlgorithmTable::Load AlgorithmTable::round_load(const PlanOptions& options) const {
  const std::size_t element = element_bytes(options);
  const bool is_scatter = options.collective == Collective::kReduceScatter;
  const std::size_t longest =
      element * (options.blocks.empty() ? options.count : *std::ranges::max_element(options.blocks));
  const Sections sections(staging_bytes_, is_scatter ? options.blocks.size() : 1, longest);
  if (sections.most() == 0) throw_usage("rounds need staging memory of a cache line for each rank");
  Load load;
  load.segments = std::max<std::size_t>(sections.segments(), 1);
  load.round_bytes = sections.published(0, longest);
  // The last block may be one row shorter than the others.
  const std::size_t last_block = is_scatter ? element * options.blocks.back() : longest;
  load.last_round_bytes = sections.published(load.segments - 1, last_block);
  load.is_broadcast = options.collective == Collective::kBroadcast;
  return load;
}

double AlgorithmTable::seconds(const Load& load, const Cluster& cluster, const CostModel& model) const {
  if (load.plan)
    return model.call_seconds + round_.seconds(0, cluster, model) +
           price(*load.plan, cluster, model).seconds(load.segments);
  const RoundLoad& round = load.is_broadcast ? broadcast_round() : round_;
  double seconds = model.call_seconds + round.seconds(load.last_round_bytes, cluster, model);
  if (load.segments > 1)
    seconds += static_cast<double>(load.segments - 1) * round.seconds(load.round_bytes, cluster, model);
  return seconds;
}

double AlgorithmTable::seconds(const Load& load, const JobCosts& costs) const {
  Cluster cluster = cluster_;
  set_speeds(cluster, costs);
  return seconds(load, cluster, cost_model(costs));
}

const RoundLoad& AlgorithmTable::broadcast_round() const {
  if (!broadcast_round_) broadcast_round_.emplace(cluster_, 0);
  return *broadcast_round_;
}

/// What any plan takes: the exchange of headers and one message.
double AlgorithmTable::least_plan_seconds() const {
  double latency = std::numeric_limits<double>::infinity();
  for (const Interface& interface : cluster_.hosts.front().interfaces)
    latency = std::min(latency, interface.latency);
  for (const LinkCost& link : model_.dimensions) latency = std::min(latency, link.latency);
  return model_.call_seconds + round_.seconds(0, cluster_, model_) + latency;
}

AlgorithmTable::Entry AlgorithmTable::rounds(const PlanOptions& options) const {
  Entry entry;
  entry.algorithm.staged = true;
  entry.options = options;
  entry.seconds = seconds(round_load(options), cluster_, model_);
  return entry;
}

/// The largest segment with which a plan is as quick as with any (0: that of plan_segment_bytes), and how
/// long it takes then. A broadcast reaches the hosts one after the other, sooner in smaller segments; others
/// keep all links busy from the first hop on. None: staging memory is too small for so many blocks.
std::optional<AlgorithmTable::Segmented> AlgorithmTable::best_segment(const Plan& plan,
                                                                      const PlanOptions& options) const {
  Load load;
  load.plan = multiring::load_of(plan);
  std::vector<Segmented> tried;
  const auto add = [&](std::size_t segment) {
    load.segments = segments_of(options, segment);
    if (load.segments > 0) tried.push_back({segment, seconds(load, cluster_, model_)});
  };
  add(0);
  const std::size_t least = std::max(
      kMinBroadcastSegment, plan.count() * element_bytes(options) /
                                (kBroadcastSegmentsOfHost * static_cast<std::size_t>(cluster_.host_count())));
  if (plan.collective() == Collective::kBroadcast && plan.count() > 0)
    for (std::size_t segment = kMaxBroadcastSegment; segment >= least; segment /= 2) add(segment);
  if (tried.empty()) return std::nullopt;
  return simplest_quick(tried);
}

std::vector<AlgorithmTable::Entry> AlgorithmTable::plans(const PlanOptions& options) const {
  std::vector<Entry> found;
  const bool is_fixed = options.rounded && options.mode.empty();
  for (const PlanOptions& tried : is_fixed ? std::vector{options} : plan_options(cluster_, options)) {
    const Plan plan(cluster_, tried);
    const std::optional<Segmented> best = best_segment(plan, options);
    if (!best) continue;
    // The one before may be the same by one interface in place of all.
    const bool is_other = found.empty() || found.back().algorithm.mode != plan.mode();
    if (!is_other && found.back().seconds <= best->seconds) continue;
    if (is_other) found.emplace_back();
    found.back().algorithm.mode = plan.mode();
    found.back().algorithm.segment = best->segment;
    found.back().options = tried;
    found.back().seconds = best->seconds;
  }
  return found;
}

/// A reduce-scatter by the quickest plan of an allreduce.
std::optional<AlgorithmTable::Entry> AlgorithmTable::whole(const PlanOptions& options) const {
  std::vector<Entry> compared = plans(as_allreduce(options));
  if (compared.empty()) return std::nullopt;
  Entry entry = simplest_quick(compared);
  entry.algorithm.whole = true;
  return entry;
}

std::vector<AlgorithmTable::Entry> AlgorithmTable::entries(const PlanOptions& options) const {
  std::vector<Entry> found;
  if (options.mode.empty()) found.push_back(rounds(options));
  for (Entry& entry : plans(options)) found.push_back(std::move(entry));
  if (options.mode.empty() && options.collective == Collective::kReduceScatter)
    if (std::optional<Entry> entry = whole(options)) found.push_back(*std::move(entry));
  return found;
}

CrossingAlgorithm AlgorithmTable::quickest(const PlanOptions& wanted) const {
  const PlanOptions options = in_its_order(wanted);
  // Then no plan needs to be counted, which takes long among many ranks.
  if (options.mode.empty())
    if (const Entry entry = rounds(options); entry.seconds <= least_plan_seconds()) return entry.algorithm;
  const std::vector<Entry> compared = entries(options);
  if (compared.empty()) throw_usage(other_row(options).excluded);
  return simplest_quick(compared).algorithm;
}

AlgorithmRow AlgorithmTable::row_of(const Entry& entry) const {
  AlgorithmRow row;
  row.name = algorithm_name(entry.algorithm);
  row.seconds = entry.seconds;
  if (entry.algorithm.staged) {
    const Load load = round_load(entry.options);
    row.hops = load.segments * round_.steps();
    row.rank_bytes = (load.is_broadcast ? broadcast_round() : round_).rank_parts() *
                     ((load.segments - 1) * load.round_bytes + load.last_round_bytes);
    return row;
  }
  const Plan plan(cluster_, entry.options);
  row.hops = round_.steps();
  for (const Step& step : plan.steps())
    if (step.across_hosts()) row.hops += static_cast<std::size_t>(hop_count(step));
  const Traffic traffic = total_traffic(plan);
  for (const RankTraffic& rank : traffic.ranks()) row.rank_bytes = std::max(row.rank_bytes, rank.sent);
  return row;
}

/// An algorithm across hosts that is not compared: why, or what it would cost.
AlgorithmRow AlgorithmTable::other_row(const PlanOptions& options) const {
  AlgorithmRow row;
  row.name = format_mode(options.mode);
  if (const std::optional<std::pair<int, int>> missing = missing_link(cluster_, options)) {
    row.excluded =
        "host " + std::to_string(missing->first) + " has no link to host " + std::to_string(missing->second);
  } else if (options.order != Order::kAny && needs_any_order(options.mode.back())) {
    row.excluded = std::string("adds in the order of the ") + traits_of(*options.mode.back().algorithm).name +
                   " (--order any)";
  } else if (const std::optional<Segmented> best = best_segment(Plan(cluster_, options), options); !best) {
    row.excluded = "MULTIRING_STAGING_BYTES is too small for the blocks of so many ranks";
  } else {
    Entry entry;
    entry.algorithm.mode = options.mode;
    entry.options = options;
    entry.seconds = best->seconds;
    return row_of(entry);
  }
  return row;
}

std::vector<AlgorithmRow> AlgorithmTable::rows(const PlanOptions& wanted) const {
  const PlanOptions options = in_its_order(wanted);
  if (!options.mode.empty()) require_fit(options.mode, cluster_);
  std::vector<AlgorithmRow> rows;
  for (const Entry& entry : entries(options)) rows.push_back(row_of(entry));
  for (AlgorithmRow& row : rows) row.is_compared = true;
  if (rows.empty()) return {other_row(options)};
  simplest_quick(rows).is_chosen = true;
  if (!options.mode.empty()) return rows;
  for (const Algorithm algorithm : kAllAlgorithms) {
    // Blocks cross in no other way (Plan).
    const bool has_blocks = options.collective != Collective::kAllreduce;
    if (has_blocks && traits_of(algorithm).reducing_phase != Phase::kReduceScatter) continue;
    PlanOptions tried = options;
    tried.mode = flat_mode(cluster_);
    tried.mode.front().algorithm = Algorithm::kPairwise;
    tried.mode.back().algorithm = algorithm;
    if (std::ranges::find(rows, format_mode(tried.mode), &AlgorithmRow::name) == rows.end())
      rows.push_back(other_row(tried));
  }
  return rows;
}

}  // namespace multiring
