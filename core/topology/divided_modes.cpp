// The dimensions of many hosts whose user names none.

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "topology/canonical_tree.h"
#include "topology/cost_model.h"

namespace multiring {
namespace {

/// Finds the sizes of the dimensions across hosts.
class HostDimensions {
 public:
  HostDimensions(const Cluster& cluster, std::size_t bytes, const CostModel& model)
      : cluster_(cluster), model_(model), bytes_(static_cast<double>(bytes)) {
    // A link lets one burst pass in all dimensions, through which it passes about as much as in a single one.
    const auto hosts = static_cast<double>(cluster.host_count());
    beyond_burst_ = model.beyond_burst(2.0 * bytes_ * (hosts - 1.0) / hosts);
    model_.burst_bytes = 0.0;
  }

  /// The quickest of at most so many, if they are clearly quicker than a single one; else none.
  std::vector<int> best(std::size_t most) {
    best_.clear();
    least_ = seconds(1, 1, cluster_.host_count()) / kAsGood;
    std::vector<int> none;
    try_all(none, most, 1, 0.0);
    return best_;
  }

 private:
  /// All ways to go on from `sizes`, which make blocks of so many hosts, in so many seconds.
  void try_all(std::vector<int>& sizes, std::size_t most, int block, double taken) {
    const int left = cluster_.host_count() / block;
    for (int size = left; size > 1; --size) {
      if (left % size != 0) continue;
      const double seconds_so_far = taken + seconds(static_cast<int>(sizes.size()) + 1, block, size);
      if (seconds_so_far >= least_) continue;
      sizes.push_back(size);
      if (size == left) {
        best_ = sizes;
        least_ = seconds_so_far;
      } else if (sizes.size() < most) {
        try_all(sizes, most, block * size, seconds_so_far);
      }
      sizes.pop_back();
    }
  }

  /// Of the pairwise exchange of `size` blocks of so many hosts, there and back, as if nothing overlapped: so
  /// of divisions with as many messages the one with fewer bytes is quicker.
  double seconds(int dimension, int block, int size) {
    const Host& largest =
        *std::ranges::max_element(cluster_.hosts, {}, [](const Host& host) { return host.ranks.size(); });
    const double messages = 2.0 * (size - 1);
    StepLoad load;
    load.dimension = dimension;
    load.hops = 2;
    load.rank_messages = messages;
    load.link_messages = messages * static_cast<double>(largest.ranks.size());
    load.all_messages = messages * static_cast<double>(cluster_.size());
    // Sums on the way there, results on the way back.
    const double link_bytes = bytes_ / block / size * (size - 1) * (static_cast<double>(parts(block)) + 1.0);
    load.link_bytes = beyond_burst_ * link_bytes;
    load.all_bytes = link_bytes * cluster_.host_count();
    const StepCost cost = price(PlanLoad{load}, cluster_, model_).steps.front();
    return cost.latency + cost.interface_messages + cost.wire + cost.messages;
  }

  /// The most sums that a block of so many hosts has to pass on.
  std::size_t parts(int block) {
    const auto [found, added] = parts_.emplace(block, 1);
    if (!added) return found->second;
    for (int first = 0; first < cluster_.host_count(); first += block) {
      std::vector<int> ranks;
      for (int host = first; host < first + block; ++host) {
        const std::vector<int>& more = cluster_.hosts[static_cast<std::size_t>(host)].ranks;
        ranks.insert(ranks.end(), more.begin(), more.end());
      }
      std::ranges::sort(ranks);
      found->second = std::max(found->second, canonical_parts(ranks, cluster_.size()).size());
    }
    return found->second;
  }

  const Cluster& cluster_;
  CostModel model_;
  double bytes_;
  double beyond_burst_ = 1.0;
  std::vector<int> best_;
  double least_ = 0.0;
  std::map<int, std::size_t> parts_;  // by hosts of a block
};

}  // namespace

std::vector<Mode> divided_modes(const Cluster& cluster, std::size_t bytes, const CostModel& model) {
  std::vector<Mode> modes;
  if (cluster.host_count() == 1 || !cluster.fully_linked()) return modes;
  HostDimensions dimensions(cluster, bytes, model);
  for (const std::size_t most : {std::size_t{2}, static_cast<std::size_t>(cluster.host_count())}) {
    const std::vector<int> sizes = dimensions.best(most);
    if (sizes.empty()) break;
    Mode mode{flat_mode(cluster).front()};
    for (const int size : sizes) mode.push_back({size});
    if (modes.empty() || modes.front() != mode) modes.push_back(std::move(mode));
  }
  return modes;
}

}  // namespace multiring
