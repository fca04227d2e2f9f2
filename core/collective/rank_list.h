#pragma once

#include <string>
#include <vector>

#include "base/export.h"
#include "transport/transport.h"

namespace multiring {

/// "rank 3" or "ranks 0-2, 5", for messages. `ranks` in ascending order.
MULTIRING_API std::string rank_list(const std::vector<int>& ranks);
/// The same, and what the world calls them, if that differs: "rank 1 (world rank 3)".
MULTIRING_API std::string rank_list(const std::vector<int>& ranks, const Transport& transport);
/// Whether `rank`, which waits, is the first of those that do: one of them is to warn, and not all.
MULTIRING_API bool speaks_for_all(const Stragglers& missing, int rank);
/// Those that are late: "rank 3", or "rank 3 (nothing is known of ranks 5, 6, whose messages come through
/// it)".
MULTIRING_API std::string late_list(const Stragglers& missing, const Transport& transport);
/// That ranks which have come do not pass on what others have sent, and what that may mean; with none, that
/// nothing is missing here.
MULTIRING_API std::string held_up_text(const std::vector<int>& holding, const Transport& transport);

}  // namespace multiring
