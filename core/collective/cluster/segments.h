#pragma once

#include <cstddef>

/// How collectives across hosts cut arrays into segments, in bytes. Estimated where nothing else is said.
namespace multiring::segments {

// Broadcast in a chain of hosts: below kChainFrom for each host, sending to all at once is faster. The chain
// fills before the last host has the first segment; with so many segments for each host that is a small part
// of the time.
inline constexpr std::size_t kChainFrom = 64 * 1024;
inline constexpr std::size_t kMinBroadcast = 16 * 1024;
inline constexpr std::size_t kMaxBroadcast = 256 * 1024;
inline constexpr std::size_t kBroadcastCountPerHost = 8;

// Allgather, reduce-scatter.
inline constexpr std::size_t kMaxGather = 128 * 1024;
inline constexpr std::size_t kMaxScatter = 128 * 1024;

// Alltoall, gather and scatter: from kMessagesFrom on, and of pieces of kMinPiece or more, messages are worth
// it. Estimated, not measured.
inline constexpr std::size_t kMessagesFrom = 16 * 1024;
inline constexpr std::size_t kMinPiece = 1024;
inline constexpr std::size_t kMaxCopy = 256 * 1024;
// Measured on 4 x 2 emulated hosts, 1 Gbit/s: more bytes in flight made broadcasts and alltoalls slower,
// fewer messages allgathers and reduce-scatters.
inline constexpr std::size_t kBytesInFlight = 1024 * 1024;
inline constexpr std::size_t kMinInFlight = 4;
inline constexpr std::size_t kMaxInFlight = 8;

}  // namespace multiring::segments
