#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/export.h"
#include "collective/plan/plan_schedule.h"
#include "collective/plan/tuning.h"
#include "transport/transport.h"

namespace multiring {

/// What a rank keeps of its plans from one allreduce to the next.
class MULTIRING_API PlanCache {
 public:
  // Gradients come in the same sizes in every step; whoever has more sizes than this has no such steps.
  static constexpr std::size_t kMostSchedules = 256;

  /// All allreduces of at least one byte take plans of this mode, whatever a tuning says. Raises a usage
  /// error unless it fits the ranks and keeps the canonical order.
  void force_mode(Mode mode, const Transport& transport);
  /// Allreduces go as `tuning` says where it is for these hosts and ranks; otherwise nothing changes. What is
  /// rounded between hosts does not, for its bits may not depend on its size. Takes the place of the tuning
  /// before it. Raises a usage error where a mode does not fit the ranks or the canonical order.
  void follow(Tuning tuning, const Transport& transport);
  /// How an allreduce of so many bytes goes by what is forced or tuned; null: as it does without.
  const Way* way(std::size_t bytes, bool rounded) const;
  /// Of this rank, for `count` elements. The same arguments give plans that fit on all ranks. `rounded`:
  /// partial sums are of `dtype`; such a plan depends on the ranks and the mode alone, never on the count,
  /// for its steps decide on the bits. The schedule that has been unused for longest is dropped where there
  /// are too many.
  std::shared_ptr<const RankSchedule> schedule(const Transport& transport, std::size_t count, DType dtype,
                                               bool rounded = false, const Mode& mode = {});
  /// Memory of at least so many bytes, with what was last written to it. The same one until it has to grow.
  const std::shared_ptr<std::vector<std::byte>>& workspace(std::size_t bytes);

 private:
  using Key = std::tuple<std::size_t, DType, bool, Mode>;
  using Kept = std::pair<Key, std::shared_ptr<const RankSchedule>>;

  static Cluster find_cluster(const Transport& transport);
  Plan plan(std::size_t count, DType dtype, bool rounded, const Mode& mode) const;
  void require_plan(const Mode& mode) const;

  Cluster cluster_;  // empty: not yet found
  Way forced_;       // without a mode: nothing is
  Tuning tuning_;
  std::list<Kept> kept_;  // what was used last comes first
  std::map<Key, std::list<Kept>::iterator> places_;
  std::shared_ptr<std::vector<std::byte>> workspace_;
};

}  // namespace multiring
