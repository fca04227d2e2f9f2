#include "collective/plan/plan_cache.h"

#include <algorithm>
#include <bit>
#include <string>

#include "base/cache.h"
#include "base/error.h"
#include "topology/transfers.h"

namespace multiring {
namespace {

/// The largest size that is taken for the same as `bytes`: there are four in each power of two.
std::size_t class_of(std::size_t bytes) {
  const int step = std::max(static_cast<int>(std::bit_width(bytes)) - 3, 0);
  return round_up(bytes, std::size_t{1} << step);
}

bool depends_on_chunk(Algorithm algorithm, bool rounded) {
  const ByChunk by_chunk = traits_of(algorithm).by_chunk;
  return by_chunk == ByChunk::kOrder || (rounded && by_chunk == ByChunk::kRounding);
}

}  // namespace

Cluster cluster_of(const Transport& transport) {
  std::map<int, Host> hosts;
  for (int rank = 0; rank < transport.size(); ++rank)
    hosts[transport.host_number(rank)].ranks.push_back(rank);
  Cluster cluster;
  for (auto& [number, host] : hosts) cluster.hosts.push_back(std::move(host));
  const auto first = [&](const Host& host) { return host.ranks.front(); };
  cluster.links = transport.fully_linked() ? HostLinks::kSwitch
                  : transport.has_link(first(cluster.hosts.front()), first(cluster.hosts.back()))
                      ? HostLinks::kRing
                      : HostLinks::kLine;
  set_speeds(cluster, {});
  return cluster;
}

Mode PlanCache::mode_for(const Request& request) const {
  Mode mode = request.mode;
  for (Dimension& dimension : mode)
    if (dimension.algorithm && request.order != Order::kAny &&
        depends_on_chunk(*dimension.algorithm, request.rounded))
      dimension.algorithm = cluster_.fully_linked() ? Algorithm::kPairwise : Algorithm::kChain;
  return mode;
}

Plan PlanCache::plan(const Request& request, const Cluster& cluster) const {
  PlanOptions options;
  options.count = request.count;
  options.dtype = request.dtype;
  options.mode = mode_for(request);
  options.channels = 1;
  options.order = request.order;
  options.rounded = request.rounded;
  options.collective = request.collective;
  options.blocks = request.blocks;
  return Plan(cluster, options);
}

RankSchedule PlanCache::make(const Request& request, int rank) const {
  if (!request.across_hosts) return make_schedule(plan(request, cluster_), rank);
  const int host = cluster_.host_of_rank()[static_cast<std::size_t>(rank)];
  const std::vector<int>& local_ranks = cluster_.hosts[static_cast<std::size_t>(host)].ranks;
  const auto local_rank =
      static_cast<std::size_t>(std::ranges::find(local_ranks, rank) - local_ranks.begin());
  Cluster across = cluster_;
  std::vector<int> members;  // of whom the cluster's ranks are the indices
  for (Host& each : across.hosts) {
    members.push_back(each.ranks[local_rank]);
    each.ranks = {static_cast<int>(members.size()) - 1};
  }
  RankSchedule made = make_schedule(plan(request, across), host);
  for (RankSchedule::Step& step : made.steps)
    for (auto* const messages : {&step.sends, &step.receives})
      for (RankSchedule::Message& message : *messages)
        message.peer = members[static_cast<std::size_t>(message.peer)];
  return made;
}

void PlanCache::require_fit_and_links(const CrossingAlgorithm& algorithm, Collective collective,
                                      const Transport& transport) const {
  using enum CrossingAlgorithm::Kind;
  require_runs(algorithm, collective);
  if (algorithm.kind == kMessages && !cluster_.fully_linked())
    throw_usage("'" + algorithm_name(algorithm) +
                "' go from each host to each, and hosts reach their neighbours only (MULTIRING_HOST_LINKS); "
                "take rounds");
  if (algorithm.is_within_host() && cluster_.host_count() > 1)
    throw_usage("'" + algorithm_name(algorithm) +
                "' is for ranks of one host; across hosts take a mode such as " +
                format_mode(flat_mode(cluster_)) + ", or rounds");
  if (!algorithm.is_plan()) return;
  if (algorithm.kind == kAllreducePlan) collective = Collective::kAllreduce;
  require_fit(algorithm.mode, cluster_);
  PlanOptions options = collective_options(collective, 0, cluster_.size());
  options.mode = algorithm.mode;
  options.order = Order::kAny;
  if (collective != Collective::kAllreduce) Plan(cluster_, options);
  const std::optional<std::pair<int, int>> missing = missing_link(cluster_, options);
  if (!missing) return;
  const auto name = [&](int host) {
    return transport.host(cluster_.hosts[static_cast<std::size_t>(host)].ranks[0]);
  };
  throw_usage("mode " + format_mode(algorithm.mode) + " sends from " + name(missing->first) + " to " +
              name(missing->second) +
              ", which are no neighbours (MULTIRING_HOST_LINKS); between hosts take a chain (c), or in any "
              "order a ring (r)");
}

void PlanCache::force(CrossingAlgorithm algorithm, const Transport& transport) {
  cluster_ = cluster_of(transport);
  require_fit_and_links(algorithm, Collective::kAllreduce, transport);
  forced_ = std::move(algorithm);
  host_choices_ = {};
}

void PlanCache::require_rules_that_fit(const Tuning& tuning, const Transport& transport) const {
  for (const Tuning::Rule& rule : tuning.rules()) {
    try {
      require_fit_and_links(rule.algorithm, rule.collective, transport);
    } catch (const Error& error) {
      throw_usage("line " + std::to_string(rule.line) + " of the tuning: " + error.what());
    }
  }
}

void PlanCache::set_tuning(Tuning tuning, const Transport& transport) {
  if (!transport.shares_memory()) {  // where it does, no plan is used
    cluster_ = cluster_of(transport);
    require_rules_that_fit(tuning, transport);
  }
  if (tuning.costs_text() != tuning_.costs_text()) choices_ = std::make_shared<Choices>();
  tuning_ = std::move(tuning);
  const bool is_used = !transport.shares_memory() && (tuning_.costs() || !tuning_.rules().empty());
  for (const Collective each : kAllCollectives)
    rules_hashes_[static_cast<std::size_t>(each)] = is_used ? hash_of(tuning_, each) : std::uint16_t{0};
}

void PlanCache::share_choices(const PlanCache& other) {
  if (tuning_.costs_text() == other.tuning_.costs_text()) choices_ = other.choices_;
}

AlgorithmTable PlanCache::table(const Transport& transport) const {
  const JobCosts costs = tuning_.costs().value_or(JobCosts{});
  Cluster cluster = cluster_of(transport);
  set_speeds(cluster, costs);
  if (transport.shares_memory())
    cluster.hosts.front().memory = host_memory(transport.size(), transport.oversubscribed());
  return {std::move(cluster), cost_model(costs), transport.staging_bytes()};
}

HostChoice PlanCache::find_host_choice(const Transport& transport, Collective collective) const {
  // A rank alone may fuse several, and has nothing to choose.
  if (!transport.shares_memory() || transport.size() == 1)
    return forced_choice(CrossingAlgorithm::Kind::kRounds);
  if (forced_ && !forced_->is_plan() && collective == Collective::kAllreduce)
    return forced_choice(forced_->kind);
  return table(transport).host_table(collective).choice();
}

std::vector<AlgorithmRow> PlanCache::rows(const Transport& transport, Collective collective,
                                          std::size_t bytes, Order order) {
  if (!adds(collective)) order = Order::kAny;
  PlanOptions options = collective_options(collective, bytes / sizeof(float), transport.size());
  options.order = order;
  const AlgorithmTable all = table(transport);
  if (transport.shares_memory())
    return all.host_table(collective).rows(bytes, host_choice(transport, collective), order);
  std::vector<AlgorithmRow> rows = all.rows(options);
  CrossingAlgorithm used = algorithm(transport, collective, bytes, order);
  if (used.is_plan()) {  // a mode with the algorithms of all dimensions
    Request request{.count = options.count, .order = order, .mode = used.mode};
    if (used.kind == CrossingAlgorithm::Kind::kPlan) {
      request.collective = collective;
      request.blocks = options.blocks;
    }
    used.mode = plan(request, cluster_).mode();
  }
  const std::string name = algorithm_name(used);
  for (AlgorithmRow& row : rows) row.is_chosen = row.name == name;
  return rows;
}

JobCosts PlanCache::fit(std::span<const AllreduceProbe> probes, const Transport& transport) {
  return fit_costs(cluster_of(transport), probes, transport.staging_bytes());
}

const CrossingAlgorithm& PlanCache::algorithm(const Transport& transport, Collective collective,
                                              std::size_t bytes, Order order, bool rounded) {
  static const CrossingAlgorithm kRounds{CrossingAlgorithm::Kind::kRounds};
  if (transport.size() == 1 || transport.shares_memory() || bytes == 0) return kRounds;
  if (!adds(collective)) order = Order::kAny;
  if (forced_ && collective == Collective::kAllreduce) return *forced_;
  if (const CrossingAlgorithm* const rule = rounded ? nullptr : tuning_.rule(collective, bytes);
      rule != nullptr)
    return *rule;
  const std::size_t most = class_of(bytes);
  const std::lock_guard lock(choices_->mutex);
  const auto found = choices_->quickest.find({collective, most, order, rounded});
  if (found != choices_->quickest.end()) return found->second;
  if (!choices_->table) choices_->table.emplace(table(transport));
  // As for float32 of so many bytes; sums of narrower types are wider on their way.
  PlanOptions options = collective_options(collective, most / sizeof(float), transport.size());
  options.order = order;
  options.rounded = rounded;
  if (rounded) options.dtype = DType::kBFloat16;
  return choices_->quickest
      .emplace(std::tuple(collective, most, order, rounded), choices_->table->quickest(options))
      .first->second;
}

std::shared_ptr<const RankSchedule> PlanCache::schedule(const Transport& transport, Request request) {
  auto& [recent, index] = request.blocks.empty() ? allreduces_ : blocks_;
  if (const auto found = index.find(request); found != index.end()) {
    recent.splice(recent.begin(), recent, found->second);
    return recent.front().second;
  }
  if (cluster_.hosts.empty()) cluster_ = cluster_of(transport);
  auto made = std::make_shared<RankSchedule>(make(request, transport.rank()));
  if (recent.size() >= kMaxSchedules) {
    index.erase(recent.back().first);
    recent.pop_back();
  }
  recent.emplace_front(std::move(request), std::move(made));
  index[recent.front().first] = recent.begin();
  return recent.front().second;
}

const std::vector<int>& PlanCache::block_order(const Transport& transport) {
  if (cluster_.hosts.empty()) cluster_ = cluster_of(transport);
  if (block_order_.empty()) block_order_ = Blocks::order(cluster_);
  return block_order_;
}

const std::shared_ptr<std::vector<std::byte>>& PlanCache::workspace(std::size_t bytes) {
  if (workspace_ == nullptr || workspace_->size() < bytes)
    workspace_ = std::make_shared<std::vector<std::byte>>(bytes);
  return workspace_;
}

}  // namespace multiring
