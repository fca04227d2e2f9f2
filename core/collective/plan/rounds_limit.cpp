#include "collective/plan/rounds_limit.h"

#include <algorithm>

#include "base/error.h"

namespace multiring {
namespace {

// Below both sizes, of an array and of all ranks' arrays together, one round of staging memory costs less
// than a plan's several messages. Estimated, not measured.
constexpr std::size_t kPlannedFrom = 16 * 1024;
constexpr std::size_t kPlannedFromAll = 128 * 1024;

}  // namespace

std::size_t rounds_up_to(int ranks, std::size_t staging_bytes) {
  if (ranks < 1 || staging_bytes < 1) throw_usage("rounds need a rank and staging memory");
  return std::min({kPlannedFrom, kPlannedFromAll / static_cast<std::size_t>(ranks), staging_bytes});
}

bool uses_rounds(std::size_t bytes, int ranks, std::size_t staging_bytes, bool rounded) {
  // Two ranks send each other everything in both cases, but only a plan can send half precision.
  if (ranks <= 2 && !rounded) return true;
  return bytes <= rounds_up_to(ranks, staging_bytes);
}

}  // namespace multiring
