#pragma once

#include <string>
#include <vector>

#include "base/export.h"

namespace multiring {

/// "rank 3" or "ranks 0-2, 5", for messages. `ranks` in ascending order.
MULTIRING_API std::string rank_list(const std::vector<int>& ranks);

}  // namespace multiring
