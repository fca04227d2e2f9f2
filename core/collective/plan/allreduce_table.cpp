#include "collective/plan/allreduce_table.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "base/cache.h"
#include "base/error.h"
#include "collective/plan/rounds_limit.h"
#include "topology/chunks.h"
#include "topology/traffic.h"
#include "topology/transfers.h"
#include "transport/cluster/mirror_routes.h"

namespace multiring {
namespace {

/// What a round sends in which all ranks publish as many bytes, step by step.
class RoundTraffic {
 public:
  RoundTraffic(const Cluster& cluster, const CostModel& model)
      : cluster_(cluster), model_(model), hosts_(cluster.host_of_rank()) {
    for (int rank = 0; rank < cluster.size(); ++rank) add(rank);
  }

  std::size_t steps() const { return steps_.size(); }
  /// The most ranks whose data one rank sends, counted once for each message.
  std::size_t rank_parts() const { return *std::ranges::max_element(rank_parts_); }

  double seconds(std::size_t bytes) const {
    double seconds = cluster_.hosts[0].memory.latency;  // of the host's ranks, in which they publish
    for (const auto& step : steps_) {
      double sending = 0.0;
      for (const auto& [link, sent] : step) sending = std::max(sending, seconds_of(link.first, sent, bytes));
      seconds += latency() + sending;
    }
    const auto read = static_cast<double>(bytes) * static_cast<double>(cluster_.size() + 1);
    double memory = read / model_.reduction_bytes_per_second;
    for (const Host& host : cluster_.hosts)
      memory = std::max(memory, read * static_cast<double>(host.ranks.size()) / host.memory.bytes_per_second);
    return seconds + memory;
  }

 private:
  /// By a host in one step, or by a host to one neighbour.
  struct Sent {
    std::size_t parts = 0;  ///< of ranks
    std::size_t messages = 0;
    std::size_t most_messages = 0;  ///< of one rank
    std::size_t most_parts = 0;     ///< of one message
  };
  using Link = std::pair<std::size_t, int>;  // a host, and the neighbour; or -1: all others, by a switch

  std::size_t host_of(int rank) const {
    return static_cast<std::size_t>(hosts_[static_cast<std::size_t>(rank)]);
  }

  void add(int rank) {
    const MirrorRoutes routes = cluster_.fully_linked()
                                    ? mirror_routes(hosts_, rank)
                                    : neighbour_routes(hosts_, rank, cluster_.links == HostLinks::kRing);
    steps_.resize(routes.steps.size());
    std::size_t all_parts = 0;
    for (std::size_t step = 0; step < routes.steps.size(); ++step) {
      std::map<Link, std::size_t> messages;
      for (const MirrorMessage& message : routes.steps[step].out) {
        const Link link{host_of(rank),
                        cluster_.fully_linked() ? -1 : static_cast<int>(host_of(message.peer))};
        Sent& sent = steps_[step][link];
        sent.parts += message.ranks.size();
        sent.most_parts = std::max(sent.most_parts, message.ranks.size());
        ++sent.messages;
        sent.most_messages = std::max(sent.most_messages, ++messages[link]);
        all_parts += message.ranks.size();
      }
    }
    rank_parts_.push_back(all_parts);
  }

  /// An exchange crosses all dimensions, so the slowest link decides.
  double latency() const {
    double latency = 0.0;
    for (const LinkCost& link : model_.dimensions) latency = std::max(latency, link.latency);
    if (!model_.dimensions.empty()) return latency;
    for (const Interface& interface : cluster_.hosts[0].interfaces)
      latency = std::max(latency, interface.latency);
    return latency;
  }

  double speed(std::size_t host) const {
    double speed = 0.0;
    for (const Interface& interface : cluster_.hosts[host].interfaces) speed += interface.bytes_per_second;
    if (model_.dimensions.empty()) return speed;
    return std::ranges::min(model_.dimensions, {}, &LinkCost::bytes_per_second).bytes_per_second;
  }

  double seconds_of(std::size_t host, const Sent& sent, std::size_t bytes) const {
    // Headers go first, then what is staged: together if it is little.
    const bool is_combined = sent.most_parts * bytes <= MirrorRoutes::kMaxCombined;
    const std::size_t each = bytes == 0 ? 1 : is_combined ? 2 : 1 + sent.most_parts;
    return std::max({static_cast<double>(sent.parts) * static_cast<double>(bytes) / speed(host),
                     static_cast<double>(sent.most_messages * each) * model_.message_seconds,
                     static_cast<double>(sent.messages * each) * model_.interface_message_seconds});
  }

  const Cluster& cluster_;
  const CostModel& model_;
  const std::vector<int> hosts_;
  std::vector<std::map<Link, Sent>> steps_;
  std::vector<std::size_t> rank_parts_;
};

AlgorithmRow rounds_row(const RoundTraffic& round, std::size_t bytes, std::size_t staging_bytes) {
  AlgorithmRow row;
  row.name = "rounds";
  const std::size_t count = std::max<std::size_t>(segment_count(bytes, staging_bytes), 1);
  row.seconds = static_cast<double>(count - 1) * round.seconds(staging_bytes) +
                round.seconds(segment_range(bytes, staging_bytes, count - 1).size());
  row.hops = count * round.steps();
  row.rank_bytes = round.rank_parts() * bytes;
  return row;
}

AlgorithmRow plan_row(const Plan& plan, const RoundTraffic& round, const CostModel& model) {
  AlgorithmRow row;
  row.name = format_mode(plan.mode());
  row.hops = round.steps();
  for (const Step& step : plan.steps())
    if (step.across_hosts()) row.hops += static_cast<std::size_t>(hop_count(step));
  const Traffic traffic = total_traffic(plan);
  for (const RankTraffic& rank : traffic.ranks()) row.rank_bytes = std::max(row.rank_bytes, rank.sent);
  row.seconds = round.seconds(0) + predict(plan, model);
  return row;
}

/// An algorithm across hosts that is not among the candidates: why, or what it would cost.
AlgorithmRow other_row(const Cluster& cluster, const PlanOptions& options, const RoundTraffic& round,
                       const CostModel& model) {
  AlgorithmRow row;
  row.name = format_mode(options.mode);
  if (const std::optional<std::pair<int, int>> missing = missing_link(cluster, options))
    row.excluded =
        "host " + std::to_string(missing->first) + " has no link to host " + std::to_string(missing->second);
  else if (options.order != Order::kAny && needs_any_order(options.mode.back()))
    row.excluded = "adds in the order of the ring (--order any)";
  else
    return plan_row(Plan(cluster, best_candidate(plan_candidates(cluster, options, model)).options), round,
                    model);
  return row;
}

/// The name of what a job takes by itself.
std::string default_name(const Cluster& cluster, PlanOptions options, std::size_t bytes,
                         std::size_t staging_bytes) {
  if (uses_rounds(bytes, cluster.size(), staging_bytes, options.rounded)) return "rounds";
  options.mode.clear();
  return format_mode(Plan(cluster, options).mode());
}

}  // namespace

std::vector<AlgorithmRow> allreduce_table(const Cluster& cluster, const PlanOptions& options,
                                          const CostModel& model, std::size_t staging_bytes) {
  cluster.validate();
  if (cluster.host_count() == 1) throw_usage("algorithms across hosts need several hosts");
  staging_bytes = staging_bytes / kCacheLine * kCacheLine;
  if (staging_bytes == 0) throw_usage("rounds need staging memory of a cache line");
  if (!options.mode.empty()) require_fit(options.mode, cluster);
  const std::vector<PlanCandidate> candidates = plan_candidates(cluster, options, model);
  const std::size_t bytes = options.count * dtype_size(options.dtype);
  const RoundTraffic round(cluster, model);
  std::vector<AlgorithmRow> rows{rounds_row(round, bytes, staging_bytes)};
  const auto has_row = [&](const std::string& name) {
    return std::ranges::find(rows, name, &AlgorithmRow::name) != rows.end();
  };
  for (auto first = candidates.begin(); first != candidates.end();) {
    const auto end = std::find_if(first, candidates.end(), [&](const PlanCandidate& candidate) {
      return candidate.options.mode != first->options.mode;
    });
    rows.push_back(plan_row(Plan(cluster, best_candidate({first, end}).options), round, model));
    first = end;
  }
  if (options.mode.empty()) {
    for (const Algorithm algorithm : kAllAlgorithms) {
      PlanOptions tried = options;
      tried.mode = flat_mode(cluster);
      tried.mode.front().algorithm = Algorithm::kPairwise;
      tried.mode.back().algorithm = algorithm;
      if (!has_row(format_mode(tried.mode))) rows.push_back(other_row(cluster, tried, round, model));
    }
  }
  const std::string usual = default_name(cluster, options, bytes, staging_bytes);
  double least = std::numeric_limits<double>::infinity();
  for (AlgorithmRow& row : rows) {
    row.is_default = row.name == usual;
    if (row.excluded.empty()) least = std::min(least, row.seconds);
  }
  std::ranges::find_if(rows, [&](const AlgorithmRow& row) {
    return row.excluded.empty() && row.seconds <= least * kAsGood;
  })->is_quickest = true;
  return rows;
}

}  // namespace multiring
