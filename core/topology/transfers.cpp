#include "topology/transfers.h"

#include <algorithm>
#include <vector>

#include "base/cache.h"
#include "topology/algorithms/hop.h"

namespace multiring {

int hop_count(const Step& step) {
  int most = 0;
  for (const Group& group : step.groups)
    most = std::max(most, traits_of(step.algorithm).hops(group.ranks.size(), step.across_hosts()));
  return most;
}

void for_each_transfer(const Plan& plan, const Step& step, int hop,
                       const std::function<void(const Transfer&)>& visit) {
  Hop transfers(plan, step, hop, visit);
  for (const Group& group : step.groups) transfers.visit_group(group);
}

void for_each_transfer(const Plan& plan, const Step& step, const Group& group, int hop,
                       const std::function<void(const Transfer&)>& visit) {
  Hop(plan, step, hop, visit).visit_group(group);
}

std::optional<std::pair<int, int>> missing_link(const Cluster& cluster, PlanOptions options) {
  if (cluster.fully_linked()) return std::nullopt;
  // Enough elements for every rank to have some. Who sends to whom is the same in any order.
  options.count = kCacheLine * static_cast<std::size_t>(cluster.size());
  options.blocks.assign(static_cast<std::size_t>(cluster.size()), kCacheLine);
  options.order = Order::kAny;
  const Plan plan(cluster, options);
  const std::vector<int> hosts = cluster.host_of_rank();
  std::optional<std::pair<int, int>> found;
  for (const Step& step : plan.steps())
    for (int hop = 0; hop < hop_count(step) && !found; ++hop)
      for_each_transfer(plan, step, hop, [&](const Transfer& transfer) {
        const int from = hosts[static_cast<std::size_t>(transfer.from)];
        const int to = hosts[static_cast<std::size_t>(transfer.to)];
        if (!found && !have_link(cluster.links, cluster.host_count(), from, to)) found = {from, to};
      });
  return found;
}

}  // namespace multiring
