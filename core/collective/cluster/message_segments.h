#pragma once

#include <algorithm>
#include <cstddef>

namespace multiring {

/// Bytes that a message from rank to rank carries at most (cluster_copy.h). Estimated.
constexpr std::size_t message_segment_bytes(std::size_t staging_bytes) {
  constexpr std::size_t kMax = 256 * 1024;
  return std::min(kMax, staging_bytes);
}

/// Messages of a rank that are in flight at once in each direction. Measured on 4 x 2 emulated hosts, 1
/// Gbit/s: more bytes in flight made alltoalls slower.
constexpr std::size_t message_slots(std::size_t segment) {
  constexpr std::size_t kBytes = 1024 * 1024;
  return std::clamp<std::size_t>(kBytes / segment, 4, 8);
}

}  // namespace multiring
