#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/export.h"

namespace multiring {

/// How a group of ranks reduces in one dimension.
enum class Algorithm {
#define MULTIRING_ALGORITHM(name) k##name,
#include "topology/algorithms/algorithms.inc"
};

inline constexpr Algorithm kAllAlgorithms[] = {
#define MULTIRING_ALGORITHM(name) Algorithm::k##name,
#include "topology/algorithms/algorithms.inc"
};

enum class Phase { kReduceScatter, kReduce, kAllreduce, kBroadcast, kAllGather };

/// What of a sum depends on which chunk of a group's elements it is in.
enum class ByChunk {
  kNothing,
  kRounding,  ///< which of the partial sums are rounded, where any are
  kOrder,     ///< the order of additions
};

/// Where an algorithm is a candidate if none is forced.
enum class Candidate { kEverywhere, kAcrossHosts, kAmongNeighbours };

class Hop;

/// All that there is to know about an algorithm.
struct AlgorithmTraits {
  char letter;       ///< in a mode such as `4tx8d`
  const char* name;  ///< "pairwise exchange"

  // For the tables of docs/plans.md and docs/algorithms.md.
  const char* description;
  const char* hops_text;   ///< among n, there and back
  const char* bytes_text;  ///< by a host, of n that are subtrees of the canonical tree; n is a power of two
  const char* good_for;

  /// What the first step with it is, which says what ranks hold after it. Only a reduce-scatter keeps blocks
  /// apart, and nothing is left to reduce after an allreduce.
  Phase reducing_phase;
  /// Of those that are as quick, the one with the lowest number is chosen.
  int complexity;
  Candidate candidate = Candidate::kEverywhere;
  ByChunk by_chunk = ByChunk::kNothing;
  /// Whether half of the elements passes through a group backwards (Group::backward).
  bool both_directions = false;

  /// Hops of a step in a group of n, each of which needs what the one before has received.
  int (*hops)(std::size_t n, bool across_hosts);
  /// Sends what a group sends in a hop, of the first step or, if the hop does not reduce, of the way back.
  void (*transfers)(Hop& hop);
};

#define MULTIRING_ALGORITHM(name) extern const AlgorithmTraits k##name##Traits;
#include "topology/algorithms/algorithms.inc"

MULTIRING_API const AlgorithmTraits& traits_of(Algorithm algorithm);

/// "p pairwise exchange, r ring, ...", for messages; of one phase only those that begin with it.
MULTIRING_API std::string algorithm_letters(std::optional<Phase> phase = std::nullopt);

}  // namespace multiring
