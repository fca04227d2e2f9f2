#include "collective/plan/plan_cache.h"

namespace multiring {
namespace {

// Plans of one channel do not depend on speeds. Messages are striped over interfaces below.
constexpr Interface kAnyInterface{1e9, 0.0};

}  // namespace

Cluster PlanCache::find_cluster(const Transport& transport) {
  std::map<int, Host> hosts;
  for (int rank = 0; rank < transport.size(); ++rank) {
    Host& host = hosts[transport.host_number(rank)];
    host.ranks.push_back(rank);
    host.interfaces = {kAnyInterface};
  }
  Cluster cluster;
  for (auto& [number, host] : hosts) cluster.hosts.push_back(std::move(host));
  return cluster;
}

Plan PlanCache::plan(const Request& request) const {
  PlanOptions options;
  options.count = request.count;
  options.dtype = request.dtype;
  options.mode = request.mode;
  options.channels = 1;
  options.order = request.order;
  options.rounded = request.rounded;
  return Plan(cluster_, options);
}

void PlanCache::require_plan(const Mode& mode, Order order) const {
  require_fit(mode, cluster_);
  plan({.count = 1, .order = order, .mode = mode});
}

void PlanCache::force_mode(Mode mode, const Transport& transport, Order order) {
  cluster_ = find_cluster(transport);
  require_plan(mode, order);
  forced_.mode = std::move(mode);
}

void PlanCache::set_tuning(Tuning tuning, const Transport& transport, Order order) {
  cluster_ = find_cluster(transport);
  if (tuning.layout() != layout_text(cluster_)) tuning = {};
  for (const Tuning::SizeClass& each : tuning.classes())
    if (!each.algorithm.mode.empty()) require_plan(each.algorithm.mode, order);
  tuning_ = std::move(tuning);
}

const AllreduceAlgorithm* PlanCache::algorithm(std::size_t bytes, bool rounded) const {
  if (!forced_.mode.empty()) return &forced_;
  return rounded ? nullptr : tuning_.algorithm(bytes);
}

std::shared_ptr<const RankSchedule> PlanCache::schedule(const Transport& transport, Request request) {
  if (request.order != Order::kAny) request.mode = without_rings(std::move(request.mode));
  if (const auto found = index_.find(request); found != index_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second);
    return recent_.front().second;
  }
  if (cluster_.hosts.empty()) cluster_ = find_cluster(transport);
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
