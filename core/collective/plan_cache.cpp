#include "collective/plan_cache.h"

namespace multiring {
namespace {

// Gradients come in the same sizes in every step; whoever has more sizes than this has no such steps.
constexpr std::size_t kMostSchedules = 256;

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

Plan PlanCache::plan(std::size_t count, DType dtype, bool rounded) const {
  PlanOptions options;
  options.count = count;
  options.dtype = dtype;
  options.mode = mode_;
  options.channels = 1;
  options.rounded = rounded;
  return Plan(cluster_, options);
}

void PlanCache::force_mode(Mode mode, const Transport& transport) {
  cluster_ = find_cluster(transport);
  mode_ = std::move(mode);
  require_fit(mode_, cluster_);
  plan(1, DType::kFloat32, false);
}

std::shared_ptr<const RankSchedule> PlanCache::schedule(const Transport& transport, std::size_t count,
                                                        DType dtype, bool rounded) {
  const Key key{count, dtype, rounded};
  if (const auto found = schedules_.find(key); found != schedules_.end()) return found->second;
  if (schedules_.size() >= kMostSchedules) schedules_.clear();
  if (cluster_.hosts.empty()) cluster_ = find_cluster(transport);
  return schedules_[key] =
             std::make_shared<RankSchedule>(make_schedule(plan(count, dtype, rounded), transport.rank()));
}

const std::shared_ptr<std::vector<std::byte>>& PlanCache::workspace(std::size_t bytes) {
  if (workspace_ == nullptr || workspace_->size() < bytes)
    workspace_ = std::make_shared<std::vector<std::byte>>(bytes);
  return workspace_;
}

}  // namespace multiring
