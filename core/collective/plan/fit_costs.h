#pragma once

#include <cstddef>
#include <span>

#include "base/export.h"
#include "collective/plan/crossing_algorithm.h"
#include "collective/plan/job_costs.h"

namespace multiring {

/// A measured allreduce of float32.
struct AllreduceProbe {
  CrossingAlgorithm algorithm;
  std::size_t bytes = 0;
  double seconds = 0.0;
};

/// The costs by which the table of algorithms predicts the probes best: least squares of the logarithms
/// (Levenberg and Marquardt), each cost held to what is assumed of it where the probes do not tell. Raises a
/// usage error for a time that is not positive, a mode that does not fit, or no probe.
MULTIRING_API JobCosts fit_costs(const Cluster& cluster, std::span<const AllreduceProbe> probes,
                                 std::size_t staging_bytes);

}  // namespace multiring
