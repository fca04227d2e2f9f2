#include "collective/rank_list.h"

#include <algorithm>

namespace multiring {

std::string rank_list(const std::vector<int>& ranks, const Ranks& of) {
  std::vector<int> world;
  for (const int rank : ranks) world.push_back(of.world_rank(rank));
  if (world == ranks) return rank_list(ranks);
  std::ranges::sort(world);  // a group may number its ranks in another order
  return rank_list(ranks) + " (world " + rank_list(world) + ")";
}

bool is_first_waiting(const Stragglers& missing, int rank) {
  const auto has = [](const std::vector<int>& ranks, int each) {
    return std::ranges::find(ranks, each) != ranks.end();
  };
  for (int each = 0; each < rank; ++each)
    if (!has(missing.late, each) && !has(missing.unknown, each)) return false;
  return true;
}

std::string missing_list(const Stragglers& missing, const Ranks& of) {
  std::string text = rank_list(missing.late, of);
  if (!missing.unknown.empty())
    text +=
        " (nothing is known of " + rank_list(missing.unknown, of) + ", whose messages come through others)";
  return text;
}

std::string not_forwarded_text(const std::vector<int>& holding, const Ranks& of) {
  if (holding.empty())
    return "all that others have sent is here, but not all that this rank sends has left, or the last came "
           "just "
           "as the time was up: the network is slow, or a rank does not read";
  return rank_list(holding, of) + (holding.size() == 1 ? " has" : " have") +
         " come, but not what others have sent through them: a rank that forwards is stopped or waits for "
         "one that is, or the network has stalled; `ps -o pid,stat,cmd` shows a stopped process as T";
}

}  // namespace multiring
