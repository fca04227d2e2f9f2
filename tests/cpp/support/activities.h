#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "support/operations.h"

namespace multiring::testing {

/// Something that ranks do together, of many rounds.
struct Activity {
  std::string name;
  /// Does it once; all ranks call it the same number of times.
  std::function<void(Communicator&, const CallOptions&)> once;
};

/// Every collective, direct and staged, with several segments of kSmallStaging; messages around the ring;
/// split and symmetric allocation. All but the first few may be in any round when a fault strikes.
std::vector<Activity> all_activities();

}  // namespace multiring::testing
