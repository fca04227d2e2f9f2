#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"
#include "collective/plan/algorithm_row.h"
#include "collective/plan/crossing_algorithm.h"
#include "collective/plan/host_table.h"
#include "collective/plan/job_costs.h"
#include "collective/plan/message_load.h"
#include "collective/plan/round_load.h"
#include "topology/cost_model.h"

namespace multiring {

/// The algorithms of collectives among several hosts, and within one of those that add (host_table.h), each
/// with its costs: what predicts, and what chooses.
class MULTIRING_API AlgorithmTable {
 public:
  /// `staging_bytes`: what a rank publishes in a round at most. Raises a usage error for a cluster that is
  /// not valid, or no staging memory.
  AlgorithmTable(Cluster cluster, CostModel model, std::size_t staging_bytes);

  /// What runs the collective of `options`, which a `mode` restricts. Of values that are rounded between
  /// hosts the mode of the plan decides on bits, so it is always the same. Raises what Plan does.
  CrossingAlgorithm quickest(const PlanOptions& options) const {
    return choose(in_its_order(options)).algorithm;
  }

  struct Choice {
    AlgorithmRow row;
    std::optional<Plan> plan;  ///< none: rounds or messages
  };
  /// The same with its row, and the plan that runs. Raises a usage error for a single host, too.
  Choice choice(const PlanOptions& options) const;

  /// What an algorithm does, whatever it costs.
  struct Load {
    std::optional<std::size_t> header_bytes;  ///< that ranks publish in a round before; none: there is none
    std::optional<PlanLoad> plan;
    std::optional<MessageLoad> messages;  ///< neither: rounds
    std::size_t piece = 0;                ///< bytes that a rank has for another at most, by messages
    std::size_t segments = 1;             ///< of the plan; or how many rounds
    QueueLoad queue;                      ///< of the plan
    std::size_t round_bytes = 0;          ///< that a rank publishes in each round but the last
    std::size_t last_round_bytes = 0;
    std::size_t sections = 1;   ///< of what is published a rank takes one
    bool is_from_root = false;  ///< rounds in which one rank publishes
  };
  /// Within the single host. Raises what HostTable does.
  HostTable host_table(Collective collective) const;

  /// Of an allreduce of float32.
  Load load_of(const CrossingAlgorithm& algorithm, std::size_t bytes) const;
  /// Predicted, at other costs than those of the table.
  double seconds(const Load& load, const JobCosts& costs) const;
  /// The most bytes that wait for one host at a time (topology/plan_load.h).
  double queued_bytes(const Load& load) const;

  /// All algorithms: rounds, messages or the plans that are compared, then what does not run here. Raises a
  /// usage error for a single host where HostTable does, or for a mode, which is of several. `nccl`: of the
  /// job; of one host alone (of several: device_row.h).
  std::vector<AlgorithmRow> rows(const PlanOptions& options, NcclScope nccl = NcclScope::kHost) const;

 private:
  struct Entry {
    CrossingAlgorithm algorithm;
    PlanOptions options;  ///< of the plan
    double seconds = 0.0;
  };

  static PlanOptions in_its_order(PlanOptions options);
  std::vector<AlgorithmRow> host_rows(const PlanOptions& options, NcclScope nccl) const;
  Entry choose(const PlanOptions& options) const;
  std::vector<Entry> entries(const PlanOptions& options) const;
  std::vector<Entry> plans(const PlanOptions& options) const;
  /// Rounds or messages.
  Entry unplanned(CrossingAlgorithm::Kind kind, const PlanOptions& options) const;
  Load unplanned_load(CrossingAlgorithm::Kind kind, const PlanOptions& options) const;
  std::optional<Entry> allreduce_plan(const PlanOptions& options) const;
  Load round_load(const PlanOptions& options) const;
  bool fits_rounds(const PlanOptions& options) const;
  Load message_load(const PlanOptions& options) const;
  struct Segmented {
    std::size_t segment = 0;  ///< bytes; 0: as the runtime divides by itself
    double seconds = 0.0;
  };
  std::size_t segments_of(const PlanOptions& options, std::size_t segment) const;
  std::optional<Segmented> best_segment(const Plan& plan, const PlanOptions& options) const;
  const RoundLoad& round_of(const Load& load) const;
  double round_seconds(const Load& load, std::size_t bytes, const Cluster& cluster,
                       const CostModel& model) const;
  double least_plan_seconds() const;
  double seconds(const Load& load, const Cluster& cluster, const CostModel& model) const;
  Choice described(const Entry& entry) const;
  AlgorithmRow other_row(const PlanOptions& options) const;

  Cluster cluster_;
  CostModel model_;
  std::size_t staging_bytes_;
  RoundLoad round_;
  mutable std::optional<RoundLoad> root_round_;  // counted when it is needed
};

}  // namespace multiring
