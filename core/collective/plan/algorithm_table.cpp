#include "collective/plan/algorithm_table.h"

#include <algorithm>
#include <cstdint>
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
using Kind = CrossingAlgorithm::Kind;

// Segments that are tried: of a broadcast more than so many for each host do not make it quicker (measured on
// 4 x 2 emulated hosts), for what a rank does for each is not all in the model.
constexpr std::size_t kMaxTriedSegment = 512 * 1024;
constexpr std::size_t kMinBroadcastSegment = 16 * 1024;
constexpr std::size_t kBroadcastSegmentsOfHost = 8;
// Where a switch loses what does not fit into its queue.
constexpr std::size_t kMinLossySegment = 4 * 1024;

Cluster validated(Cluster cluster) {
  cluster.validate();
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

std::string no_link(int from, int to) {
  return "host " + std::to_string(from) + " has no link to host " + std::to_string(to);
}

PlanOptions as_allreduce(PlanOptions options) {
  options.count = std::accumulate(options.blocks.begin(), options.blocks.end(), std::size_t{0});
  options.blocks.clear();
  options.collective = Collective::kAllreduce;
  return options;
}

std::size_t longest_piece(const PlanOptions& options) {
  return options.blocks.empty() ? options.count : *std::ranges::max_element(options.blocks);
}

/// Into how many sections a rank divides its staging memory in rounds: one for each rank that reads, or one
/// that all read.
std::size_t section_count(const PlanOptions& options) {
  const bool is_for_each = options.collective == Collective::kReduceScatter ||
                           options.collective == Collective::kScatter ||
                           options.collective == Collective::kAlltoall;
  return is_for_each ? options.blocks.size() : 1;
}

/// What each rank of an alltoall says first: how many rows it has for each.
std::size_t splits_bytes(const Cluster& cluster) {
  return static_cast<std::size_t>(cluster.size()) * sizeof(std::uint64_t);
}

}  // namespace

AlgorithmTable::AlgorithmTable(Cluster cluster, CostModel model, std::size_t staging_bytes)
    : cluster_(validated(std::move(cluster))),
      model_(std::move(model)),
      staging_bytes_(usable(staging_bytes)),
      round_(cluster_) {}

/// Rings always run where nothing is added.
PlanOptions AlgorithmTable::in_its_order(PlanOptions options) {
  if (!adds(options.collective)) options.order = Order::kAny;
  return options;
}

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
  if (algorithm.is_rounds()) return round_load(options);
  if (algorithm.kind != CrossingAlgorithm::Kind::kPlan)
    throw_usage("an allreduce has no algorithm '" + algorithm_name(algorithm) + "'");
  options.mode = algorithm.mode;
  if (std::ranges::any_of(algorithm.mode, needs_any_order)) options.order = Order::kAny;
  Load load;
  load.header_bytes = 0;
  load.plan = multiring::load_of(Plan(cluster_, options));
  load.segments = segments_of(options, algorithm.segment);
  load.queue = queue_of(*load.plan, load.segments);
  return load;
}

AlgorithmTable::Load AlgorithmTable::round_load(const PlanOptions& options) const {
  const std::size_t element = element_bytes(options);
  const std::size_t longest = element * longest_piece(options);
  Load load;
  load.sections = section_count(options);
  const Sections sections(staging_bytes_, load.sections, longest);
  if (sections.most() == 0) throw_usage("rounds need staging memory of a cache line for each rank");
  if (options.collective == Collective::kAlltoall) load.header_bytes = splits_bytes(cluster_);
  load.segments = std::max<std::size_t>(sections.segments(), 1);
  load.round_bytes = sections.published(0, longest);
  // The last block may be one row shorter than the others.
  const std::size_t last_block = load.sections > 1 ? element * options.blocks.back() : longest;
  load.last_round_bytes = sections.published(load.segments - 1, last_block);
  load.is_from_root =
      options.collective == Collective::kBroadcast || options.collective == Collective::kScatter;
  return load;
}

/// Whether staging memory has room for a section of each rank.
bool AlgorithmTable::fits_rounds(const PlanOptions& options) const {
  return Sections(staging_bytes_, section_count(options), 1).most() > 0;
}

AlgorithmTable::Load AlgorithmTable::message_load(const PlanOptions& options) const {
  Load load;
  load.header_bytes = options.collective == Collective::kAlltoall ? splits_bytes(cluster_) : 0;
  load.messages.emplace(cluster_, options.collective);
  load.piece = element_bytes(options) * longest_piece(options);
  return load;
}

double AlgorithmTable::seconds(const Load& load, const Cluster& cluster, const CostModel& model) const {
  double seconds = model.call_seconds;
  if (load.header_bytes) seconds += round_.seconds(*load.header_bytes, *load.header_bytes, 1, cluster, model);
  if (load.plan)
    return seconds + price(*load.plan, cluster, model).seconds(load.segments) + model.held_up(load.queue);
  if (load.messages) return seconds + load.messages->seconds(load.piece, staging_bytes_, cluster, model);
  seconds += round_seconds(load, load.last_round_bytes, cluster, model);
  if (load.segments > 1)
    seconds += static_cast<double>(load.segments - 1) * round_seconds(load, load.round_bytes, cluster, model);
  return seconds;
}

double AlgorithmTable::round_seconds(const Load& load, std::size_t bytes, const Cluster& cluster,
                                     const CostModel& model) const {
  return round_of(load).seconds(bytes, bytes / load.sections, load.segments, cluster, model);
}

double AlgorithmTable::seconds(const Load& load, const JobCosts& costs) const {
  Cluster cluster = cluster_;
  set_speeds(cluster, costs);
  return seconds(load, cluster, cost_model(costs));
}

double AlgorithmTable::queued_bytes(const Load& load) const {
  if (load.messages) return 0.0;  // not counted
  if (load.plan) return load.queue.bytes;
  return round_of(load).queued_parts() *
         static_cast<double>(std::max(load.round_bytes, load.last_round_bytes));
}

const RoundLoad& AlgorithmTable::round_of(const Load& load) const {
  if (!load.is_from_root) return round_;
  if (!root_round_) root_round_.emplace(cluster_, 0);
  return *root_round_;
}

/// What any plan takes: the exchange of headers and one message.
double AlgorithmTable::least_plan_seconds() const {
  double latency = std::numeric_limits<double>::infinity();
  for (const Interface& interface : cluster_.hosts.front().interfaces)
    latency = std::min(latency, interface.latency);
  for (const LinkCost& link : model_.dimensions) latency = std::min(latency, link.latency);
  return model_.call_seconds + round_.seconds(0, 0, 1, cluster_, model_) + latency;
}

AlgorithmTable::Load AlgorithmTable::unplanned_load(CrossingAlgorithm::Kind kind,
                                                    const PlanOptions& options) const {
  return kind == CrossingAlgorithm::Kind::kMessages ? message_load(options) : round_load(options);
}

AlgorithmTable::Entry AlgorithmTable::unplanned(CrossingAlgorithm::Kind kind,
                                                const PlanOptions& options) const {
  Entry entry;
  entry.algorithm.kind = kind;
  entry.options = options;
  entry.seconds = seconds(unplanned_load(kind, options), cluster_, model_);
  return entry;
}

/// The largest segment with which a plan is as quick as with any, if `options` name none (0: that of
/// plan_segment_bytes), and how long it takes then. A broadcast reaches the hosts one after the other, sooner
/// in smaller segments; others keep all links busy from the first hop on, but a switch may lose less of
/// smaller ones. None: staging memory is too small for so many blocks.
std::optional<AlgorithmTable::Segmented> AlgorithmTable::best_segment(const Plan& plan,
                                                                      const PlanOptions& options) const {
  Load load;
  load.header_bytes = 0;
  load.plan = multiring::load_of(plan);
  std::vector<Segmented> tried;
  const auto add = [&](std::size_t segment) {
    load.segments = segments_of(options, segment);
    if (load.segments == 0) return;
    if (model_.loss_seconds > 0.0) load.queue = queue_of(*load.plan, load.segments);
    tried.push_back({segment, seconds(load, cluster_, model_)});
  };
  add(options.segment);
  std::size_t least = kMaxTriedSegment + 1;
  if (plan.collective() == Collective::kBroadcast)
    least = std::max(kMinBroadcastSegment,
                     plan.count() * element_bytes(options) /
                         (kBroadcastSegmentsOfHost * static_cast<std::size_t>(cluster_.host_count())));
  if (model_.held_up(load.queue) > 0.0) least = kMinLossySegment;
  if (plan.count() > 0 && options.segment == 0)
    for (std::size_t segment = kMaxTriedSegment; segment >= least; segment /= 2) add(segment);
  if (tried.empty()) return std::nullopt;
  return simplest_quick(tried);
}

std::vector<AlgorithmTable::Entry> AlgorithmTable::plans(const PlanOptions& options) const {
  std::vector<Entry> found;
  const bool is_fixed = options.rounded && options.mode.empty();
  const std::size_t bytes = options.count * element_bytes(options);
  const std::size_t at_once =
      bytes == 0 ? 0 : plan_segment_bytes(bytes, hierarchy_staging_bytes(staging_bytes_), options.segment);
  for (const PlanOptions& tried :
       is_fixed ? std::vector{options} : plan_options(cluster_, options, at_once, model_)) {
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
std::optional<AlgorithmTable::Entry> AlgorithmTable::allreduce_plan(const PlanOptions& options) const {
  std::vector<Entry> compared = plans(as_allreduce(options));
  if (compared.empty()) return std::nullopt;
  Entry entry = simplest_quick(compared);
  entry.algorithm.kind = CrossingAlgorithm::Kind::kAllreducePlan;
  return entry;
}

std::vector<AlgorithmTable::Entry> AlgorithmTable::entries(const PlanOptions& options) const {
  std::vector<Entry> found;
  // Of two that are as quick the one that sends less comes first.
  if (!has_plans(options.collective) && cluster_.fully_linked())
    found.push_back(unplanned(Kind::kMessages, options));
  if (options.mode.empty() && (found.empty() || fits_rounds(options)))
    found.push_back(unplanned(Kind::kRounds, options));
  if (!has_plans(options.collective)) return found;
  for (Entry& entry : plans(options)) found.push_back(std::move(entry));
  if (options.mode.empty() && options.collective == Collective::kReduceScatter)
    if (std::optional<Entry> entry = allreduce_plan(options)) found.push_back(*std::move(entry));
  return found;
}

AlgorithmTable::Entry AlgorithmTable::choose(const PlanOptions& options) const {
  // Then no plan needs to be counted, which takes long among many ranks.
  if (options.mode.empty() && has_plans(options.collective))
    if (Entry entry = unplanned(Kind::kRounds, options); entry.seconds <= least_plan_seconds()) return entry;
  std::vector<Entry> compared = entries(options);
  if (compared.empty())
    throw_usage("mode " + format_mode(options.mode) + " does not run: " + other_row(options).excluded +
                (cluster_.fully_linked()
                     ? ""
                     : "; hosts that reach their neighbours only take one dimension, by a "
                       "chain (c), or in any order a ring (r)"));
  return std::move(simplest_quick(compared));
}

HostTable AlgorithmTable::host_table(Collective collective) const {
  return {collective, cluster_.size(), cluster_.hosts.front().memory, staging_bytes_};
}

std::vector<AlgorithmRow> AlgorithmTable::host_rows(const PlanOptions& options, NcclScope nccl) const {
  const HostTable table = host_table(options.collective);
  if (!options.mode.empty())
    throw_usage("mode " + format_mode(options.mode) +
                " is for several hosts; within one there are direct, staged and rounds");
  const std::size_t count =
      options.blocks.empty() ? options.count
                             : std::accumulate(options.blocks.begin(), options.blocks.end(), std::size_t{0});
  return table.rows(count * element_bytes(options), table.choice(), options.order, nccl);
}

AlgorithmTable::Choice AlgorithmTable::choice(const PlanOptions& options) const {
  if (cluster_.host_count() == 1) throw_usage("ranks of one host have no plan; see the table of algorithms");
  Choice found = described(choose(in_its_order(options)));
  found.row.is_compared = found.row.is_chosen = true;
  return found;
}

AlgorithmTable::Choice AlgorithmTable::described(const Entry& entry) const {
  Choice found;
  AlgorithmRow& row = found.row;
  row.name = algorithm_name(entry.algorithm);
  row.seconds = entry.seconds;
  if (!entry.algorithm.is_plan()) {
    const Load load = unplanned_load(entry.algorithm.kind, entry.options);
    row.segments = load.segments;
    if (load.header_bytes) {
      row.hops = round_.steps();
      row.rank_bytes = round_.rank_parts() * *load.header_bytes;
    }
    row.hops += load.messages ? 1 : load.segments * round_.steps();
    row.rank_bytes += load.messages ? load.messages->rank_pieces() * load.piece
                                    : round_of(load).rank_parts() *
                                          ((load.segments - 1) * load.round_bytes + load.last_round_bytes);
    return found;
  }
  const Plan& plan = found.plan.emplace(cluster_, entry.options);
  row.segments = segments_of(entry.options, entry.algorithm.segment);
  row.hops = round_.steps();
  for (const Step& step : plan.steps())
    if (step.across_hosts()) row.hops += static_cast<std::size_t>(hop_count(step));
  const Traffic traffic = total_traffic(plan);
  for (const RankTraffic& rank : traffic.ranks()) row.rank_bytes = std::max(row.rank_bytes, rank.sent);
  return found;
}

/// An algorithm across hosts that is not compared: why, or what it would cost.
AlgorithmRow AlgorithmTable::other_row(const PlanOptions& options) const {
  AlgorithmRow row;
  row.name = format_mode(options.mode);
  if (const std::optional<std::pair<int, int>> missing = missing_link(cluster_, options)) {
    row.excluded = no_link(missing->first, missing->second);
  } else if (options.order != Order::kAny && needs_any_order(options.mode.back())) {
    row.excluded = std::string("adds in the order of the ") + traits_of(*options.mode.back().algorithm).name +
                   " (--order any)";
  } else if (const std::optional<Segmented> best = best_segment(Plan(cluster_, options), options); !best) {
    row.excluded = "MULTIRING_STAGING_BYTES is too small for the blocks of so many ranks";
  } else {
    Entry entry;
    entry.algorithm.mode = options.mode;
    entry.algorithm.segment = best->segment;
    entry.options = options;
    entry.seconds = best->seconds;
    return described(entry).row;
  }
  return row;
}

std::vector<AlgorithmRow> AlgorithmTable::rows(const PlanOptions& wanted, NcclScope nccl) const {
  if (cluster_.host_count() == 1) return host_rows(wanted, nccl);
  const PlanOptions options = in_its_order(wanted);
  if (!has_plans(options.collective) && !options.mode.empty()) Plan(cluster_, options);  // raises
  if (!options.mode.empty()) require_fit(options.mode, cluster_);
  std::vector<AlgorithmRow> rows;
  for (const Entry& entry : entries(options)) rows.push_back(described(entry).row);
  for (AlgorithmRow& row : rows) row.is_compared = true;
  if (rows.empty()) return {other_row(options)};
  simplest_quick(rows).is_chosen = true;
  if (!options.mode.empty()) return rows;
  if (!has_plans(options.collective)) {
    if (!cluster_.fully_linked()) {  // messages need a link between every two hosts
      rows.emplace_back().name = algorithm_name({CrossingAlgorithm::Kind::kMessages});
      rows.back().excluded = no_link(0, 2);
    }
    return rows;
  }
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
