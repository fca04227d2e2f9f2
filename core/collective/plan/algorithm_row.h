#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "topology/cost_model.h"

namespace multiring {

/// An algorithm of a collective: a row of `multiring plan --explain`.
struct AlgorithmRow {
  /// "rounds", "messages", the mode of a plan, or "allreduce:" and a mode; on one host "rounds", "direct" or
  /// "staged", of arrays on devices "nccl" or "peers" (crossing_algorithm.h).
  std::string name;
  std::string excluded;        ///< why it does not run here; empty: it does
  std::string needs;           ///< what arrays it runs for; empty: all
  std::size_t hops = 0;        ///< messages between hosts, each of which waits for the one before
  std::size_t rank_bytes = 0;  ///< the most that a rank sends to other hosts, without headers
  std::size_t segments = 1;    ///< in which a plan passes, one after the other; or how many rounds
  double seconds = 0.0;        ///< by the cost model, with the exchange of headers that comes before a plan
  bool is_compared = false;    ///< with the others, to choose
  bool is_chosen = false;  ///< what a job runs: the simplest of those that are about as quick as the quickest
};

/// The first of those that are as good as the quickest.
template <class Entries>
auto& simplest_quick(Entries& entries) {
  double least = entries.front().seconds;
  for (const auto& entry : entries) least = std::min(least, entry.seconds);
  return *std::ranges::find_if(entries, [&](const auto& entry) { return entry.seconds <= least * kAsGood; });
}

}  // namespace multiring
