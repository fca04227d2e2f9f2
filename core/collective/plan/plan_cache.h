#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/order.h"
#include "base/export.h"
#include "collective/plan/algorithm_table.h"
#include "collective/plan/fit_costs.h"
#include "collective/plan/plan_schedule.h"
#include "collective/plan/tuning.h"
#include "transport/transport.h"

namespace multiring {

/// The hosts and ranks of a group. Messages are striped over interfaces below.
Cluster cluster_of(const Transport& transport);

/// What a rank keeps of its plans from one collective to the next.
class MULTIRING_API PlanCache {
 public:
  // Enough for the gradients of a training step, whose sizes repeat.
  static constexpr std::size_t kMaxSchedules = 256;

  /// What a schedule is for. The same on all ranks.
  struct Request {
    std::size_t count = 0;  ///< elements
    DType dtype = DType::kFloat32;
    /// Partial sums are of `dtype`; the steps of such a plan decide on the bits, so in the canonical order
    /// they depend on the ranks and the mode alone, never on the count.
    bool rounded = false;
    Order order = Order::kCanonical;
    /// Empty: automatic. In the canonical order others take the place of rings, and, if rounded, of chains.
    Mode mode = {};
    Collective collective = Collective::kAllreduce;
    std::vector<std::size_t> blocks = {};  ///< elements by rank, of what is no allreduce
    /// Among the ranks of all hosts that have this one's local number, instead of all ranks; the mode has one
    /// rank within a host.
    bool across_hosts = false;
    auto operator<=>(const Request&) const = default;
  };

  /// All allreduces of at least one byte use this algorithm, whatever the tuning; among ranks that share
  /// memory modes change nothing. Raises a usage error unless it fits the ranks and the links between hosts.
  void force(CrossingAlgorithm algorithm, const Transport& transport);
  /// Replaces the tuning. Raises a usage error where a rule does not fit the ranks or the links.
  void set_tuning(Tuning tuning, const Transport& transport);
  /// Uses, and adds to, what the other one has chosen, if that has the same costs; it is of the same ranks.
  void share_choices(const PlanCache& other);
  /// Of a collective of so many bytes (an allgather or gather: the longest piece; an alltoall: the longest
  /// times the ranks): what is forced (allreduces only), or what a rule of the tuning says, or else the
  /// quickest by the table of algorithms. Of what is rounded between hosts bits may not depend on the size,
  /// so rules do not count there. The same on all ranks. Stays as it is until the next call that changes
  /// something here.
  const CrossingAlgorithm& algorithm(const Transport& transport, Collective collective, std::size_t bytes,
                                     Order order, bool rounded = false);
  /// How an allreduce or a reduce-scatter runs among ranks that share memory; others have rounds only,
  /// besides their plans.
  const HostChoice& host_choice(const Transport& transport, Collective collective) {
    std::optional<HostChoice>& known = host_choices_[static_cast<std::size_t>(collective)];
    return known ? *known : known.emplace(find_host_choice(transport, collective));
  }
  /// A hash of what decides on a collective whose algorithm is not known before ranks are matched; 0: no
  /// tuning.
  std::uint16_t rules_hash(Collective collective) const {
    return rules_hashes_[static_cast<std::size_t>(collective)];
  }
  /// The table of algorithms of a collective of float32, with the one that is used as the chosen one.
  std::vector<AlgorithmRow> rows(const Transport& transport, Collective collective, std::size_t bytes,
                                 Order order);
  /// The costs that explain what was measured among these ranks (fit_costs.h).
  static JobCosts fit(std::span<const AllreduceProbe> probes, const Transport& transport);
  /// This rank's schedule. The same requests give schedules that match on all ranks. Least recently used ones
  /// are dropped: of allreduces, and of blocks, whose sizes repeat less often.
  std::shared_ptr<const RankSchedule> schedule(const Transport& transport, Request request);
  /// In which order blocks lie in a plan.
  const std::vector<int>& block_order(const Transport& transport);
  /// Memory of at least so many bytes, kept between calls; replaced only where it has to grow.
  const std::shared_ptr<std::vector<std::byte>>& workspace(std::size_t bytes);

 private:
  /// What depends on ranks and costs alone. Counting what plans do takes long among many ranks.
  struct Choices {
    std::mutex mutex;
    std::optional<AlgorithmTable> table;
    // By class of sizes.
    std::map<std::tuple<Collective, std::size_t, Order, bool>, CrossingAlgorithm> quickest;
  };
  using Kept = std::pair<Request, std::shared_ptr<const RankSchedule>>;

  AlgorithmTable table(const Transport& transport) const;
  HostChoice find_host_choice(const Transport& transport, Collective collective) const;
  Mode mode_for(const Request& request) const;
  Plan plan(const Request& request, const Cluster& cluster) const;
  RankSchedule make(const Request& request, int rank) const;
  void require_rules_that_fit(const Tuning& tuning, const Transport& transport) const;
  void require_fit_and_links(const CrossingAlgorithm& algorithm, Collective collective,
                             const Transport& transport) const;

  Cluster cluster_;  // empty: not yet found
  std::optional<CrossingAlgorithm> forced_;
  std::array<std::optional<HostChoice>, std::size(kAllCollectives)> host_choices_;
  Tuning tuning_;
  std::array<std::uint16_t, std::size(kAllCollectives)> rules_hashes_{};  // by collective
  std::shared_ptr<Choices> choices_ = std::make_shared<Choices>();
  struct Schedules {
    std::list<Kept> recent;  // most recently used first
    std::map<Request, std::list<Kept>::iterator> index;
  };
  Schedules allreduces_;
  Schedules blocks_;
  std::vector<int> block_order_;  // empty: not yet found
  std::shared_ptr<std::vector<std::byte>> workspace_;
};

}  // namespace multiring
