// The dimensions of a cluster whose user names none.

#include <algorithm>
#include <map>
#include <span>
#include <vector>

#include "topology/canonical_tree.h"
#include "topology/dimensions.h"

namespace multiring {
namespace {

// A step costs about as much as so many messages: both depend on the network. With this the plans of 16 to
// 64 hosts that were simulated (models/scaling) were within a tenth of the quickest of their sizes.
constexpr double kStepInMessages = 2.5;
// So few are not divided.
constexpr int kMaxUndivided = 8;
// So much may more dimensions send.
constexpr double kMaxBytes = 1.05;

/// Finds the sizes of the dimensions across hosts. Between n hosts each rank sends a message to n - 1 others;
/// in dimensions of n1 x n2 x ... only n1 - 1 + n2 - 1 + ..., in more steps. They send the same bytes, unless
/// the sums of several hosts are more than one node of the canonical tree.
class HostDimensions {
 public:
  explicit HostDimensions(const Cluster& cluster) : cluster_(cluster) {}

  std::vector<int> best() {
    best_ = {cluster_.host_count()};
    least_ = steps_and_messages(best_);
    most_bytes_ = bytes(best_) * kMaxBytes;
    std::vector<int> none;
    try_all(none, cluster_.host_count());
    return best_;
  }

 private:
  static double steps_and_messages(std::span<const int> sizes) {
    double cost = 0.0;
    for (const int size : sizes) cost += kStepInMessages + size - 1;
    return cost;
  }

  /// All ways to go on from `sizes` with so many hosts left.
  void try_all(std::vector<int>& sizes, int left) {
    if (left == 1 && steps_and_messages(sizes) < least_ && bytes(sizes) <= most_bytes_) {
      best_ = sizes;
      least_ = steps_and_messages(sizes);
    }
    for (int size = left; size > 1; --size) {
      if (left % size != 0) continue;
      sizes.push_back(size);
      if (steps_and_messages(sizes) < least_) try_all(sizes, left / size);
      sizes.pop_back();
    }
  }

  /// What a host sends and receives, in parts of the data: sums on the way in, results on the way back.
  double bytes(std::span<const int> sizes) {
    double all = 0.0;
    double share = 1.0;
    int block = 1;
    for (const int size : sizes) {
      share /= size;
      all += share * (size - 1) * (parts(block) + 1.0);
      block *= size;
    }
    return all;
  }

  /// The most sums that a block of so many hosts has to pass on.
  double parts(int block) {
    const auto [found, added] = parts_.emplace(block, 1);
    if (!added) return static_cast<double>(found->second);
    for (int first = 0; first < cluster_.host_count(); first += block) {
      std::vector<int> ranks;
      for (int host = first; host < first + block; ++host) {
        const std::vector<int>& more = cluster_.hosts[static_cast<std::size_t>(host)].ranks;
        ranks.insert(ranks.end(), more.begin(), more.end());
      }
      std::ranges::sort(ranks);
      found->second = std::max(found->second, canonical_parts(ranks, cluster_.size()).size());
    }
    return static_cast<double>(found->second);
  }

  const Cluster& cluster_;
  std::vector<int> best_;
  double least_ = 0.0;
  double most_bytes_ = 0.0;
  std::map<int, std::size_t> parts_;  // by hosts of a block
};

}  // namespace

Mode flat_mode(const Cluster& cluster) {
  std::size_t most = 0;
  for (const Host& host : cluster.hosts) most = std::max(most, host.ranks.size());
  Mode mode{{static_cast<int>(most)}};
  if (cluster.host_count() > 1) mode.push_back({cluster.host_count()});
  return mode;
}

Mode automatic_mode(const Cluster& cluster) {
  Mode mode = flat_mode(cluster);
  if (cluster.host_count() <= kMaxUndivided || !cluster.fully_linked()) return mode;
  mode.pop_back();
  for (const int size : HostDimensions(cluster).best()) mode.push_back({size});
  return mode;
}

}  // namespace multiring
