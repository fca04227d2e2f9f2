#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/order.h"
#include "base/export.h"
#include "collective/plan/plan_schedule.h"
#include "collective/plan/tuning.h"
#include "transport/transport.h"

namespace multiring {

/// What a rank keeps of its plans from one allreduce to the next.
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
    Mode mode;
    auto operator<=>(const Request&) const = default;
  };

  /// All allreduces of at least one byte use plans of this mode, whatever the tuning. Raises a usage error
  /// unless the mode fits the ranks and the links between hosts.
  void force_mode(Mode mode, const Transport& transport);
  /// Replaces the tuning. It counts if its layout is that of these hosts and ranks, and not for allreduces
  /// that round between hosts, whose bits may not depend on the size. Raises a usage error where a mode does
  /// not fit the ranks or the links.
  void set_tuning(Tuning tuning, const Transport& transport);
  /// The forced or tuned algorithm of an allreduce of so many bytes; null: neither.
  const AllreduceAlgorithm* algorithm(std::size_t bytes, bool rounded) const;
  /// This rank's schedule. The same requests give schedules that match on all ranks. Least recently used ones
  /// are dropped.
  std::shared_ptr<const RankSchedule> schedule(const Transport& transport, Request request);
  /// Memory of at least so many bytes, kept between calls; replaced only where it has to grow.
  const std::shared_ptr<std::vector<std::byte>>& workspace(std::size_t bytes);

 private:
  using Kept = std::pair<Request, std::shared_ptr<const RankSchedule>>;

  void find_cluster(const Transport& transport);
  Mode mode_for(const Request& request) const;
  Plan plan(const Request& request) const;
  void require_plan(const Mode& mode, const Transport& transport) const;

  Cluster cluster_;            // empty: not yet found
  AllreduceAlgorithm forced_;  // without a mode: none
  Tuning tuning_;
  std::list<Kept> recent_;  // most recently used first
  std::map<Request, std::list<Kept>::iterator> index_;
  std::shared_ptr<std::vector<std::byte>> workspace_;
};

}  // namespace multiring
