#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/export.h"
#include "topology/dimensions.h"

namespace multiring {

/// How an allreduce across hosts runs.
struct AllreduceAlgorithm {
  bool staged = false;      ///< "rounds": every rank's whole array goes to every host, without a plan
  Mode mode = {};           ///< of the plan
  std::size_t segment = 0;  ///< bytes of the array that a plan takes at once; 0: plan_segment_bytes()
};

/// Reads "rounds", or a mode, which may be followed by the bytes of a segment (4px2d/65536, 4px2d/64K).
/// Raises a usage error that shows the text and what is wrong with it.
MULTIRING_API AllreduceAlgorithm parse_algorithm(std::string_view text);

/// Reads 4096, 64K, 1M or 1G (factors of 1024). Raises a usage error.
MULTIRING_API std::size_t parse_bytes(std::string_view text);

/// Bytes of the array that a plan takes at once, where staging memory has so many: at most `wanted` (0: as
/// many as keep several segments in flight). Staging memory holds a segment, and a share of the results of
/// another. `bytes` and `staging_bytes`: at least 1.
MULTIRING_API std::size_t plan_segment_bytes(std::size_t bytes, std::size_t staging_bytes,
                                             std::size_t wanted = 0);

}  // namespace multiring
