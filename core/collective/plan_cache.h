#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "base/dtype.h"
#include "base/export.h"
#include "collective/plan_schedule.h"
#include "transport/transport.h"

namespace multiring {

/// What a rank keeps of its plans from one allreduce to the next.
class MULTIRING_API PlanCache {
 public:
  /// All allreduces of at least one byte take plans of this mode. Raises a usage error unless it fits the
  /// ranks and keeps the canonical order.
  void force_mode(Mode mode, const Transport& transport);
  bool is_forced() const { return !mode_.empty(); }
  /// Of this rank, for `count` elements. The same arguments give plans that fit on all ranks. `rounded`:
  /// partial sums are of `dtype`; such a plan depends on the ranks and the mode alone, never on the count,
  /// for its steps decide on the bits.
  std::shared_ptr<const RankSchedule> schedule(const Transport& transport, std::size_t count, DType dtype,
                                               bool rounded = false);
  /// Memory of at least so many bytes, with what was last written to it. The same one until it has to grow.
  const std::shared_ptr<std::vector<std::byte>>& workspace(std::size_t bytes);

 private:
  using Key = std::tuple<std::size_t, DType, bool>;

  static Cluster find_cluster(const Transport& transport);
  Plan plan(std::size_t count, DType dtype, bool rounded) const;

  Cluster cluster_;  // empty: not yet found
  Mode mode_;        // empty: automatic
  std::map<Key, std::shared_ptr<const RankSchedule>> schedules_;
  std::shared_ptr<std::vector<std::byte>> workspace_;
};

}  // namespace multiring
