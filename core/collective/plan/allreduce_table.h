#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/export.h"
#include "topology/cost_model.h"

namespace multiring {

/// A way to run an allreduce across hosts: a row of `multiring plan --explain`.
struct AlgorithmRow {
  std::string name;            ///< "rounds" (mirrored exchanges, no plan), or the mode of a plan
  std::string excluded;        ///< why it does not run here; empty: it does
  std::size_t hops = 0;        ///< messages between hosts, each of which waits for the one before
  std::size_t rank_bytes = 0;  ///< the most that a rank sends to other hosts, without headers
  double seconds = 0.0;        ///< by the cost model, with the exchange of headers that comes before a plan
  bool is_default = false;     ///< what runs where no mode is forced and no tuning is given
  bool is_quickest = false;    ///< of those within 2 % of the lowest time, the simplest
};

/// All ways to run the allreduce of `options` among several hosts: rounds, the plans that `choose_plan`
/// compares (the best segment of each), then what it leaves out. `staging_bytes`: what a rank publishes in a
/// round at most. Raises what Plan does.
MULTIRING_API std::vector<AlgorithmRow> allreduce_table(const Cluster& cluster, const PlanOptions& options,
                                                        const CostModel& model, std::size_t staging_bytes);

}  // namespace multiring
