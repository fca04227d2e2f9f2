#pragma once

#include <algorithm>
#include <cstddef>

namespace multiring {

/// Bytes that a message from rank to rank carries at most (cluster_copy.h). Estimated.
constexpr std::size_t message_segment_bytes(std::size_t staging_bytes) {
  constexpr std::size_t kMax = 256 * 1024;
  return std::min(kMax, staging_bytes);
}

}  // namespace multiring
