#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "topology/chunks.h"
#include "topology/dimensions.h"
#include "topology/plan.h"

namespace multiring {

/// How a collective across hosts runs, or an allreduce within one.
struct CrossingAlgorithm {
  enum class Kind {
    kPlan,           ///< its mode: a plan of the collective itself
    kAllreducePlan,  ///< "allreduce:MODE": a reduce-scatter by the plan of an allreduce
    kRounds,         ///< "rounds": what every rank has goes to every host, or to every rank of one
    kMessages,       ///< "messages": what a rank has for another goes there alone
    kDirect,         ///< "direct": slices of arrays in memory that the ranks of a host share
    kStaged,         ///< "staged": the same through staging memory
    kNccl,           ///< "nccl": on the devices on which the arrays of all ranks lie; cannot be forced
    kPeers,          ///< "peers": the same, in memory of the devices that the ranks share
  };
  Kind kind = Kind::kPlan;
  Mode mode = {};           ///< of a plan
  std::size_t segment = 0;  ///< bytes of the array that a plan takes at once; 0: plan_segment_bytes()

  bool is_rounds() const { return kind == Kind::kRounds; }
  bool is_plan() const { return kind == Kind::kPlan || kind == Kind::kAllreducePlan; }
  bool is_within_host() const { return kind == Kind::kDirect || kind == Kind::kStaged; }
};

/// Reads "rounds", "messages", "direct", "staged", or a mode (a reduce-scatter also that of an allreduce:
/// allreduce:4px2d), which may be followed by the bytes of a segment (4px2d/65536, 4px2d/64K). Raises a usage
/// error that shows the text and what is wrong with it.
MULTIRING_API CrossingAlgorithm parse_algorithm(std::string_view text);
/// Raises a usage error unless the collective has such an algorithm, whatever the ranks and hosts.
MULTIRING_API void require_runs(const CrossingAlgorithm& algorithm, Collective collective);
/// "rounds", "messages", ..., or the mode: what it is called in tables, and read back.
MULTIRING_API std::string algorithm_name(const CrossingAlgorithm& algorithm);

/// A hash of name and segment, for ranks to compare; 0: rounds.
MULTIRING_API std::uint16_t hash_of(const CrossingAlgorithm& algorithm);

/// Reads 4096, 64K, 1M or 1G (factors of 1024). Raises a usage error.
MULTIRING_API std::size_t parse_bytes(std::string_view text);

/// Bytes of the array that the plan of an allreduce takes at once, where staging memory has so many: at most
/// `wanted` (0: as many as keep several segments in flight). Staging memory holds a segment, and a share of
/// the results of another. `bytes` and `staging_bytes`: at least 1.
MULTIRING_API std::size_t plan_segment_bytes(std::size_t bytes, std::size_t staging_bytes,
                                             std::size_t wanted = 0);

/// What a plan of blocks takes of each block at once: bytes from the begin of the block, where it is that
/// long. `blocks`: bytes of each, at least one of them not 0. Staging memory holds a segment; none where it
/// is too small for so many blocks.
MULTIRING_API std::vector<Range> block_segments(std::span<const std::size_t> blocks,
                                                std::size_t staging_bytes, std::size_t wanted = 0);

}  // namespace multiring
