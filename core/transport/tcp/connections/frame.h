#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/export.h"
#include "transport/abort_record.h"

namespace multiring::tcp {

// After its handshake a connection carries frames, each a header of fixed size and `bytes` of payload.
// Functions here are pure, and accept whatever bytes a peer may send.

enum class FrameKind : std::uint8_t {
  kData = 1,     ///< a part of a message, or all of it
  kAbort = 2,    ///< the sender's first error
  kGoodbye = 3,  ///< the sender leaves; nothing follows
};

struct FrameHeader {
  FrameKind kind = FrameKind::kData;
  std::uint32_t channel = 0;
  std::uint64_t sequence = 0;       ///< of the message in its channel: 1, 2, 3, ...
  std::uint64_t message_bytes = 0;  ///< of the whole message
  std::uint64_t offset = 0;         ///< of the payload in the message
  std::uint64_t bytes = 0;          ///< of payload
  bool operator==(const FrameHeader&) const = default;
};

inline constexpr std::size_t kFrameHeaderBytes = 48;
using FrameHeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

/// Longest payload of an abort: the record's numbers and its texts, cut as in shared memory.
inline constexpr std::size_t kAbortTextBytes = 4095;
inline constexpr std::size_t kAbortNumberBytes = 15;
inline constexpr std::size_t kMaxAbortBytes =
    kAbortNumberBytes + AbortRecord::kOperationBytes + AbortRecord::kTensorBytes + kAbortTextBytes;

MULTIRING_API FrameHeaderBytes encode_frame_header(const FrameHeader& header);
/// None: it is not a header, or not consistent. Data lies within its message, and is empty only if the
/// message is; an abort's payload has a limit; a goodbye has none.
MULTIRING_API std::optional<FrameHeader> parse_frame_header(std::span<const std::byte> bytes);

/// Header and payload of an abort; the texts are cut to their limits.
MULTIRING_API std::vector<std::byte> encode_abort(const AbortRecord& record);
MULTIRING_API std::vector<std::byte> encode_goodbye();
/// The payload of an abort among `size` ranks.
MULTIRING_API std::optional<AbortRecord> parse_abort(std::span<const std::byte> payload, int size);

}  // namespace multiring::tcp
