#include "collective/plan/allreduce_table.h"

#include <algorithm>
#include <utility>

#include "base/cache.h"
#include "base/error.h"
#include "topology/chunks.h"
#include "topology/traffic.h"
#include "topology/transfers.h"
#include "transport/hierarchy.h"

namespace multiring {
namespace {

Cluster validated(Cluster cluster) {
  cluster.validate();
  if (cluster.host_count() == 1) throw_usage("algorithms across hosts need several hosts");
  return cluster;
}

std::size_t usable(std::size_t staging_bytes) {
  if (staging_bytes < kCacheLine) throw_usage("rounds need staging memory of a cache line");
  return staging_bytes / kCacheLine * kCacheLine;
}

/// Bytes of the array. Only float32 is rounded, and not in rounds.
std::size_t array_bytes(const PlanOptions& options) {
  return options.count * (options.rounded ? sizeof(float) : dtype_size(options.dtype));
}

/// The first of those that are as good as the quickest.
template <class Entries>
auto& simplest_quick(Entries& entries) {
  double least = entries.front().seconds;
  for (const auto& entry : entries) least = std::min(least, entry.seconds);
  return *std::ranges::find_if(entries, [&](const auto& entry) { return entry.seconds <= least * kAsGood; });
}

}  // namespace

AllreduceTable::AllreduceTable(Cluster cluster, CostModel model, std::size_t staging_bytes)
    : cluster_(validated(std::move(cluster))),
      model_(std::move(model)),
      staging_bytes_(usable(staging_bytes)),
      round_(cluster_) {}

AllreduceTable::Load AllreduceTable::load_of(const Plan& plan, std::size_t bytes, std::size_t segment) const {
  Load load{bytes, multiring::load_of(plan)};
  if (bytes > 0)
    load.segments =
        segment_count(bytes, plan_segment_bytes(bytes, hierarchy_staging_bytes(staging_bytes_), segment));
  return load;
}

AllreduceTable::Load AllreduceTable::load_of(const AllreduceAlgorithm& algorithm, std::size_t bytes) const {
  if (algorithm.staged) return {bytes, std::nullopt};
  PlanOptions options;
  options.count = bytes / sizeof(float);
  options.mode = algorithm.mode;
  if (std::ranges::any_of(algorithm.mode, needs_any_order)) options.order = Order::kAny;
  return load_of(Plan(cluster_, options), bytes, algorithm.segment);
}

double AllreduceTable::seconds(const Load& load, const Cluster& cluster, const CostModel& model) const {
  double seconds = model.call_seconds;
  if (load.plan)
    return seconds + round_.seconds(0, cluster, model) +
           price(*load.plan, cluster, model).seconds(load.segments);
  const std::size_t count = std::max<std::size_t>(segment_count(load.bytes, staging_bytes_), 1);
  const std::size_t last = segment_range(load.bytes, staging_bytes_, count - 1).size();
  if (count > 1) seconds += static_cast<double>(count - 1) * round_.seconds(staging_bytes_, cluster, model);
  seconds += round_.seconds(last, cluster, model);
  return seconds;
}

double AllreduceTable::seconds(const Load& load, const JobCosts& costs) const {
  Cluster cluster = cluster_;
  set_speeds(cluster, costs);
  return seconds(load, cluster, cost_model(costs));
}

std::vector<AllreduceTable::Entry> AllreduceTable::entries(const PlanOptions& options) const {
  std::vector<Entry> found;
  const std::size_t bytes = array_bytes(options);
  if (options.mode.empty()) {
    Entry& rounds = found.emplace_back();
    rounds.algorithm.staged = true;
    rounds.options = options;
    rounds.seconds = seconds({bytes, std::nullopt}, cluster_, model_);
  }
  const bool is_fixed = options.rounded && options.mode.empty();
  for (const PlanOptions& tried : is_fixed ? std::vector{options} : plan_options(cluster_, options)) {
    const Plan plan(cluster_, tried);
    const double needed = seconds(load_of(plan, bytes, 0), cluster_, model_);
    // The one before may be the same by one interface in place of all.
    const bool is_other = found.empty() || found.back().algorithm.mode != plan.mode();
    if (is_other) found.emplace_back().algorithm.mode = plan.mode();
    if (!is_other && found.back().seconds <= needed) continue;
    found.back().options = tried;
    found.back().seconds = needed;
  }
  return found;
}

AllreduceAlgorithm AllreduceTable::quickest(const PlanOptions& options) const {
  const std::vector<Entry> compared = entries(options);
  if (compared.empty()) throw_usage(other_row(options).excluded);
  return simplest_quick(compared).algorithm;
}

AlgorithmRow AllreduceTable::row_of(const Entry& entry) const {
  AlgorithmRow row;
  row.seconds = entry.seconds;
  if (entry.algorithm.staged) {
    const std::size_t bytes = array_bytes(entry.options);
    row.name = "rounds";
    row.hops = std::max<std::size_t>(segment_count(bytes, staging_bytes_), 1) * round_.steps();
    row.rank_bytes = round_.rank_parts() * bytes;
    return row;
  }
  const Plan plan(cluster_, entry.options);
  row.name = format_mode(plan.mode());
  row.hops = round_.steps();
  for (const Step& step : plan.steps())
    if (step.across_hosts()) row.hops += static_cast<std::size_t>(hop_count(step));
  const Traffic traffic = total_traffic(plan);
  for (const RankTraffic& rank : traffic.ranks()) row.rank_bytes = std::max(row.rank_bytes, rank.sent);
  return row;
}

/// An algorithm across hosts that is not compared: why, or what it would cost.
AlgorithmRow AllreduceTable::other_row(const PlanOptions& options) const {
  AlgorithmRow row;
  row.name = format_mode(options.mode);
  if (const std::optional<std::pair<int, int>> missing = missing_link(cluster_, options)) {
    row.excluded =
        "host " + std::to_string(missing->first) + " has no link to host " + std::to_string(missing->second);
  } else if (options.order != Order::kAny && needs_any_order(options.mode.back())) {
    row.excluded = "adds in the order of the ring (--order any)";
  } else {
    Entry entry;
    entry.algorithm.mode = options.mode;
    entry.options = options;
    entry.seconds = seconds(load_of(Plan(cluster_, options), array_bytes(options), 0), cluster_, model_);
    return row_of(entry);
  }
  return row;
}

std::vector<AlgorithmRow> AllreduceTable::rows(const PlanOptions& options) const {
  if (!options.mode.empty()) require_fit(options.mode, cluster_);
  std::vector<AlgorithmRow> rows;
  for (const Entry& entry : entries(options)) rows.push_back(row_of(entry));
  for (AlgorithmRow& row : rows) row.is_compared = true;
  if (rows.empty()) return {other_row(options)};
  simplest_quick(rows).is_chosen = true;
  if (!options.mode.empty()) return rows;
  for (const Algorithm algorithm : kAllAlgorithms) {
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
