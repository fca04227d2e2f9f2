#pragma once

#include <string>
#include <vector>

#include "base/export.h"
#include "base/text.h"
#include "transport/ranks.h"
#include "transport/rounds.h"

namespace multiring {

/// As rank_list of base/text.h, with world ranks where they differ: "rank 1 (world rank 3)".
MULTIRING_API std::string rank_list(const std::vector<int>& ranks, const Ranks& of);
/// Whether `rank` is the first of the ranks that wait: only that one warns.
MULTIRING_API bool is_first_waiting(const Stragglers& missing, int rank);
/// The ranks that have not come: "rank 3", or "rank 3 (nothing is known of ranks 5, 6, whose messages come
/// through it)".
MULTIRING_API std::string missing_list(const Stragglers& missing, const Ranks& of);
/// Why ranks that have come do not forward what others have sent; with none, that nothing is missing.
MULTIRING_API std::string not_forwarded_text(const std::vector<int>& holding, const Ranks& of);

}  // namespace multiring
