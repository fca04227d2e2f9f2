#pragma once

#include <cstddef>

/// How collectives across hosts cut arrays into segments, in bytes. Estimated where nothing else is said.
namespace multiring::segments {

// Alltoall, gather and scatter: from kMessagesFrom on, and of pieces of kMinPiece or more, messages are worth
// it. Estimated, not measured.
inline constexpr std::size_t kMessagesFrom = 16 * 1024;
inline constexpr std::size_t kMinPiece = 1024;
inline constexpr std::size_t kMaxCopy = 256 * 1024;
// Measured on 4 x 2 emulated hosts, 1 Gbit/s: more bytes in flight made alltoalls slower.
inline constexpr std::size_t kBytesInFlight = 1024 * 1024;
inline constexpr std::size_t kMinInFlight = 4;
inline constexpr std::size_t kMaxInFlight = 8;

}  // namespace multiring::segments
