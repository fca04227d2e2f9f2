#include "collective/plan/plan_cache.h"

#include "base/cache.h"
#include "topology/transfers.h"

namespace multiring {
namespace {

// Plans of one channel do not depend on speeds. Messages are striped over interfaces below.
constexpr Interface kAnyInterface{1e9, 0.0};

/// Whether in which order elements are added, or which sums of them are rounded, depends on their chunk.
bool depends_on_chunk(Algorithm algorithm, bool rounded) {
  return algorithm == Algorithm::kRing || (rounded && algorithm == Algorithm::kChain);
}

}  // namespace

void PlanCache::find_cluster(const Transport& transport) {
  std::map<int, Host> hosts;
  for (int rank = 0; rank < transport.size(); ++rank) {
    Host& host = hosts[transport.host_number(rank)];
    host.ranks.push_back(rank);
    host.interfaces = {kAnyInterface};
  }
  cluster_.hosts.clear();
  for (auto& [number, host] : hosts) cluster_.hosts.push_back(std::move(host));
  cluster_.links = transport.fully_linked() ? HostLinks::kSwitch
                   : transport.has_link(cluster_.hosts.front().ranks[0], cluster_.hosts.back().ranks[0])
                       ? HostLinks::kRing
                       : HostLinks::kLine;
}

Mode PlanCache::mode_for(const Request& request) const {
  Mode mode = request.mode;
  for (Dimension& dimension : mode)
    if (dimension.algorithm && request.order != Order::kAny &&
        depends_on_chunk(*dimension.algorithm, request.rounded))
      dimension.algorithm = cluster_.fully_linked() ? Algorithm::kPairwise : Algorithm::kChain;
  return mode;
}

Plan PlanCache::plan(const Request& request) const {
  PlanOptions options;
  options.count = request.count;
  options.dtype = request.dtype;
  options.mode = mode_for(request);
  options.channels = 1;
  options.order = request.order;
  options.rounded = request.rounded;
  return Plan(cluster_, options);
}

void PlanCache::require_plan(const Mode& mode, const Transport& transport) const {
  require_fit(mode, cluster_);
  PlanOptions options;
  options.mode = mode;
  const std::optional<std::pair<int, int>> missing = missing_link(cluster_, options);
  if (!missing) return;
  const auto name = [&](int host) {
    return transport.host(cluster_.hosts[static_cast<std::size_t>(host)].ranks[0]);
  };
  throw_usage("mode " + format_mode(mode) + " sends from " + name(missing->first) + " to " +
              name(missing->second) +
              ", which are no neighbours (MULTIRING_HOST_LINKS); between hosts take a chain (c), or in any "
              "order a ring (r)");
}

void PlanCache::force_mode(Mode mode, const Transport& transport) {
  find_cluster(transport);
  require_plan(mode, transport);
  forced_.mode = std::move(mode);
}

void PlanCache::set_tuning(Tuning tuning, const Transport& transport) {
  find_cluster(transport);
  if (tuning.layout() != layout_text(cluster_)) tuning = {};
  for (const Tuning::SizeClass& each : tuning.classes())
    if (!each.algorithm.mode.empty()) require_plan(each.algorithm.mode, transport);
  tuning_ = std::move(tuning);
}

const AllreduceAlgorithm* PlanCache::algorithm(std::size_t bytes, bool rounded) const {
  if (!forced_.mode.empty()) return &forced_;
  return rounded ? nullptr : tuning_.algorithm(bytes);
}

std::shared_ptr<const RankSchedule> PlanCache::schedule(const Transport& transport, Request request) {
  if (const auto found = index_.find(request); found != index_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second);
    return recent_.front().second;
  }
  if (cluster_.hosts.empty()) find_cluster(transport);
  auto made = std::make_shared<RankSchedule>(make_schedule(plan(request), transport.rank()));
  if (recent_.size() >= kMaxSchedules) {
    index_.erase(recent_.back().first);
    recent_.pop_back();
  }
  recent_.emplace_front(std::move(request), std::move(made));
  index_[recent_.front().first] = recent_.begin();
  return recent_.front().second;
}

const std::shared_ptr<std::vector<std::byte>>& PlanCache::workspace(std::size_t bytes) {
  if (workspace_ == nullptr || workspace_->size() < bytes)
    workspace_ = std::make_shared<std::vector<std::byte>>(bytes);
  return workspace_;
}

}  // namespace multiring
