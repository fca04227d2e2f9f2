#pragma once

#include <cstddef>
#include <vector>

#include "base/export.h"
#include "topology/plan.h"

namespace multiring {

/// Bytes of one interface, or cable, in a step: as many as all interfaces of the host would pass meanwhile.
struct LinkLoad {
  double sent = 0.0;
  double received = 0.0;
};

/// By receiving host.
using HostBytes = std::vector<double>;

/// What a step in which chunks go whole does, whatever that costs: hop by hop, of the busiest.
struct StepLoad {
  int dimension = 0;
  int hops = 0;
  double rank_messages = 0.0;
  double link_messages = 0.0;
  double all_messages = 0.0;    ///< of all ranks together
  double link_bytes = 0.0;      ///< as those of LinkLoad
  double all_bytes = 0.0;       ///< that all ranks together send to other hosts
  double rank_memory = 0.0;     ///< bytes that a rank reads and writes
  double host_memory = 0.0;     ///< bytes that the ranks of a host read and write
  std::vector<LinkLoad> links;  ///< by number, the same in all steps; those of the last ones may be missing
  std::vector<HostBytes> received;  ///< by hop across hosts that share a switch

  bool across_hosts() const { return dimension > 0; }
};

/// Counted once, priced as often as costs change (cost_model.h).
using PlanLoad = std::vector<StepLoad>;

MULTIRING_API PlanLoad load_of(const Plan& plan);

/// What the queue of a switch may have to keep for a host. All that is on its way to it counts, for a link
/// that has saved up what it did not send passes more at once than the next one.
struct QueueLoad {
  double bytes = 0.0;  ///< the most that is on its way to one host at a time
  double times = 1.0;  ///< that as many pieces pass as are on their way at once
};

/// Of a plan whose chunks go in so many pieces (at least 1): kPipelineDepth of them are in a hop, while those
/// before are in the next one.
MULTIRING_API QueueLoad queue_of(const PlanLoad& load, std::size_t segments);

}  // namespace multiring
