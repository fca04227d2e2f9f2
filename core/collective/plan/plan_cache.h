#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/arithmetic/dtype.h"
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

  /// All allreduces of at least one byte use plans of this mode, whatever the tuning. Raises a usage error
  /// unless the mode fits the ranks and keeps the canonical order.
  void force_mode(Mode mode, const Transport& transport);
  /// Replaces the tuning. It counts if its layout is that of these hosts and ranks, and not for allreduces
  /// that round between hosts, whose bits may not depend on the size. Raises a usage error where a mode does
  /// not fit the ranks or the canonical order.
  void set_tuning(Tuning tuning, const Transport& transport);
  /// The forced or tuned algorithm of an allreduce of so many bytes; null: neither.
  const AllreduceAlgorithm* algorithm(std::size_t bytes, bool rounded) const;
  /// This rank's schedule for `count` elements. The same arguments give schedules that match on all ranks.
  /// `rounded`: partial sums are of `dtype`; the steps of such a plan decide on the bits, so they depend on
  /// the ranks and the mode alone, never on the count. Least recently used schedules are dropped.
  std::shared_ptr<const RankSchedule> schedule(const Transport& transport, std::size_t count, DType dtype,
                                               bool rounded = false, const Mode& mode = {});
  /// Memory of at least so many bytes, kept between calls; replaced only where it has to grow.
  const std::shared_ptr<std::vector<std::byte>>& workspace(std::size_t bytes);

 private:
  using Key = std::tuple<std::size_t, DType, bool, Mode>;
  using Kept = std::pair<Key, std::shared_ptr<const RankSchedule>>;

  static Cluster find_cluster(const Transport& transport);
  Plan plan(std::size_t count, DType dtype, bool rounded, const Mode& mode) const;
  void require_plan(const Mode& mode) const;

  Cluster cluster_;            // empty: not yet found
  AllreduceAlgorithm forced_;  // without a mode: none
  Tuning tuning_;
  std::list<Kept> recent_;  // most recently used first
  std::map<Key, std::list<Kept>::iterator> index_;
  std::shared_ptr<std::vector<std::byte>> workspace_;
};

}  // namespace multiring
